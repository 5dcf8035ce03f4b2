"""Speed of the PTX emulator: lane-instructions per second, and a 512^3 fp16 matmul.

    python benchmarks/emulator_speed.py --out benchmarks/results/emulator_speed.json

Needs no GPU. The kernels are compiled before the clock starts.
"""

import argparse
import json
import os
import pathlib
import platform
import sys
import time
import timeit

import torch

from minitriton.bench.sources import products, rows
from minitriton.runtime.emulator.parser import parse


def timed(call, repeats: int = 3):
    """Best of some runs in seconds, and the counters of one; the first run compiles."""
    report = call().report
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best, report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="")
    parser.add_argument("--check", default="", help="emulator checks: '' (default), all or none")
    arguments = parser.parse_args()
    os.environ["MINITRITON_CHECK"] = arguments.check or "none"
    results: dict = {
        "command": " ".join(sys.argv), "cpus": os.cpu_count(), "python": platform.python_version(),
        "checks": os.environ["MINITRITON_CHECK"],
    }  # fmt: skip
    n = 512
    a, b = torch.randn(n, n).half(), torch.randn(n, n).half()
    c = torch.empty(n, n).half()

    def matmul():
        return products.matmul_kernel[(16,)](
            a, b, c, n, n, n, n, 1, n, 1, n, 1,
            BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, GROUP_M=8, num_warps=8, num_stages=3,
        )  # fmt: skip

    x, y = torch.randn(1 << 20), torch.randn(1 << 20)
    out = torch.empty_like(x)
    table = torch.randn(512, 1024)
    soft = torch.empty_like(table)
    works = {
        "matmul fp16 512^3": matmul,
        "vector add 2^20": lambda: rows.add_kernel[(1024,)](x, y, out, x.numel(), BLOCK=1024),
        "softmax 512x1024": lambda: rows.softmax_kernel[(512,)](
            soft, table, 1024, 1024, 1024, BLOCK=1024
        ),
    }
    for name, call in works.items():
        seconds, counters = timed(call)
        results[name] = {
            "seconds": seconds,
            "lane_instructions": counters.lane_instructions,
            "million_lane_instructions_per_second": counters.lane_instructions / seconds / 1e6,
        }
        print(f"{name:24s} {seconds:8.3f} s {counters.lane_instructions / seconds / 1e6:8.1f} M/s")
    ptx = matmul().asm["ptx"]
    lines = ptx.count("\n")
    parse(ptx)  # builds the grammar's tables
    best = min(timeit.repeat(lambda: parse(ptx), number=1, repeat=5))
    results["parse PTX"] = {"lines": lines, "seconds": best}
    print(f"parse {lines} lines of PTX {best * 1e3:8.1f} ms")
    error = (c.double() - a.double() @ b.double()).norm() / (a.double() @ b.double()).norm()
    assert error < 1e-3, error
    if arguments.out:
        pathlib.Path(arguments.out).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
