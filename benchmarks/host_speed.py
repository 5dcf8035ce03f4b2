"""Host-side costs: launch, compilation, import, first kernel of a process with a warm cache.

    python benchmarks/host_speed.py --out benchmarks/results/host_speed.json

With a GPU the launch and compile times stand beside Triton's in the same process; without one
only what needs no GPU is measured (compilation to PTX and cubin, import).
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from minitriton.bench import sources


def launch_cost(rounds: int = 20, launches: int = 2000) -> dict[str, float]:
    """Median seconds of host time a launch of a 4-argument kernel, contenders interleaved."""
    import torch

    x, y = torch.randn(1024, device="cuda"), torch.randn(1024, device="cuda")
    out = torch.empty_like(x)
    calls = {"torch.add": lambda: torch.add(x, y, out=out)}
    for name in ("minitriton", "triton"):
        kernel = sources.load("rows", name).nop_kernel
        calls[name] = lambda k=kernel: k[(1,)](x, y, 1024, 77)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            torch.cuda.synchronize()
            # few enough launches that the queue of the driver never fills
            start = time.perf_counter()
            for _ in range(launches // 10):
                call()
            times[name].append((time.perf_counter() - start) / (launches // 10))
            torch.cuda.synchronize()
    return {name: statistics.median(values) for name, values in times.items()}


CHILD = """
import sys, time, json, os, torch
from minitriton.bench import sources
names = "rows", "products", "attentions"
rows, products, attentions = (sources.load(name, sys.argv[1]) for name in names)
dev = os.environ["DEV"]
x = torch.randn(4096, device=dev); y = torch.randn(4096, device=dev); out = torch.empty_like(x)
a = torch.randn(256, 256, device=dev).to(torch.bfloat16)
c = torch.empty_like(a)
def sync():
    if dev == "cuda": torch.cuda.synchronize()
def timed(f):
    sync(); s = time.perf_counter(); f(); sync(); return time.perf_counter() - s
def add(): rows.add_kernel[(4,)](x, y, out, 4096, BLOCK=1024)
def mm(block_n=128, num_warps=8, num_stages=3):
    products.matmul_kernel[(4,)](
        a, a, c, 256, 256, 256, 256, 1, 256, 1, 256, 1, BLOCK_M=128, BLOCK_N=block_n, BLOCK_K=64,
        GROUP_M=8, num_warps=num_warps, num_stages=num_stages,
    )
q = torch.randn(1, 256, 1, 128, device=dev).to(torch.bfloat16)
def attend(num_warps, num_stages):
    attentions.attention_kernel[(2, 1)](
        q, q, q, torch.empty_like(q), x, 0.1, 1, 256, *q.stride()[:3], *q.stride()[:3],
        HEAD_DIM=128, BLOCK_M=128, BLOCK_N=128, GROUP=1, CAUSAL=True, num_warps=num_warps,
        num_stages=num_stages,
    )
def soft(n=1024, **options):
    rows.softmax_kernel[(4,)](out, x, 1024, 1024, n, BLOCK=1024, **options)
r = {"first add": timed(add)}
if sys.argv[2] == "cold":
    timed(soft)
    r["process warm: softmax num_warps=8"] = timed(lambda: soft(1000, num_warps=8))
    r["process warm: add"] = timed(lambda: rows.add_kernel[(4,)](x, y, out, 4096, BLOCK=512))
    timed(mm)
    r["process warm: matmul 128x128x64"] = timed(lambda: mm(num_warps=4))
    r["process warm: matmul 128x256x64"] = timed(lambda: mm(256, num_stages=4))
    attend(4, 2)
    r["process warm: attention 128x128"] = timed(lambda: attend(8, 2))
print(json.dumps(r))
"""


def compile_cost(which: str, device: str, repeats: int = 3) -> dict[str, float]:
    """Median seconds from call to result: cold cache, then a fresh process with a warm one."""
    collected: dict[str, list[float]] = {}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as cache:
            env = dict(
                os.environ, MINITRITON_CACHE_DIR=cache, TRITON_CACHE_DIR=cache, DEV=device
            )  # fmt: skip
            for mode in ("cold", "warm"):
                out = subprocess.run(
                    [sys.executable, "-c", CHILD, which, mode],
                    env=env, capture_output=True, text=True, check=True,
                )  # fmt: skip
                for name, seconds in json.loads(out.stdout.splitlines()[-1]).items():
                    collected.setdefault(f"{mode} cache: {name}", []).append(seconds)
    return {name: statistics.median(values) for name, values in collected.items()}


def import_cost(module: str, repeats: int = 5) -> float:
    """Median seconds of `import module` in a fresh interpreter."""
    code = f"import time; s = time.perf_counter(); import {module}; print(time.perf_counter() - s)"
    return statistics.median(
        float(
            subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True
            ).stdout
        )
        for _ in range(repeats)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="")
    arguments = parser.parse_args()
    import torch

    gpu = torch.cuda.is_available()
    results: dict = {"command": " ".join(sys.argv), "import minitriton": import_cost("minitriton")}
    if gpu:
        from minitriton.bench import measure

        results["machine"] = measure.machine()
        results["launch"] = launch_cost()
        results["triton"] = compile_cost("triton", "cuda")
    results["minitriton"] = compile_cost("minitriton", "cuda" if gpu else "cpu")
    print(json.dumps(results, indent=1))
    if arguments.out:
        pathlib.Path(arguments.out).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
