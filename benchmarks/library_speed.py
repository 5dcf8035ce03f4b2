"""Speed of the kernel library beside plain torch, torch.compile and fla-core, at K3's sizes.

    python benchmarks/library_speed.py --out benchmarks/results/library_speed.json
    python benchmarks/library_speed.py --only kda --rounds 10

Needs a GPU. "floor" is the longer of two times: the bytes which must move, at the copy bandwidth
measured in the same run, and the operations, at the bf16 rate of cuBLAS measured in the same run.
Every contender's result is compared with the reference before it is timed; contenders that are not
installed or fail are named and left out. The first call is timed with an empty cache.
"""

import argparse
import json
import os
import pathlib
import sys
import tempfile
import time

os.environ.setdefault("MINITRITON_CACHE_DIR", tempfile.mkdtemp(prefix="minitriton-"))
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import library_cases
import timing
import torch


def copy_bandwidth() -> float:
    """Bytes per second, read plus written, of a device-to-device copy."""
    x = torch.randn(1 << 29, device="cuda")
    y = torch.empty_like(x)
    return 8 * x.numel() / timing.compare({"copy": lambda: y.copy_(x)}, 10)["copy"]


def matmul_rate() -> float:
    """FLOP per second of cuBLAS on bf16 matrices of 8192 x 8192."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / timing.compare({"matmul": lambda: a @ b}, 10)["matmul"]


def first_call(call) -> float:
    """Seconds of a call up to the end of its kernels, once CUDA itself has started."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def usable(case: library_cases.Case) -> tuple[dict, dict[str, float]]:
    """The contenders that run and agree with the case's reference; seconds of their first calls."""
    calls, firsts = {}, {}
    for name, call in case.calls.items():
        try:
            firsts[name] = first_call(call)
            error = case.error(call()) if case.error else 0.0
        except Exception as error:  # a peer's failure must not end the run, nor hide ours
            if name == "minitriton":
                raise
            print(f"    {name}: left out: {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        if not error <= case.bound:
            assert name != "minitriton", (case.title, error)
            print(f"    {name}: left out: its error is {error:.1e}", flush=True)
            continue
        calls[name] = call
    return calls, firsts


def measure(case: library_cases.Case, rounds: int, bandwidth: float, rate: float) -> dict:
    calls, firsts = usable(case)
    floor = max(case.bytes / bandwidth, case.flop / rate)
    times = timing.compare(calls, min(rounds, case.rounds))
    shown = ", ".join(f"{n} {t * 1e3:.3f}" for n, t in times.items())
    print(
        f"{case.title:52s} floor {floor * 1e3:.3f} ms: {shown}; "
        f"first call {firsts['minitriton']:.2f} s",
        flush=True,
    )
    return {"floor": floor, "seconds": times, "first call": firsts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="", help="families, separated by commas")
    parser.add_argument("--peers", action="store_true", help="fla-core in every case (slow)")
    arguments = parser.parse_args()
    bandwidth, rate = copy_bandwidth(), matmul_rate()
    print(f"copy {bandwidth / 1e12:.2f} TB/s, cuBLAS bf16 {rate / 1e12:.0f} TFLOP/s", flush=True)
    results: dict = {
        "machine": timing.machine(), "command": " ".join(sys.argv),
        "copy bandwidth": bandwidth, "matmul rate": rate, "entries": {},
    }  # fmt: skip
    chosen = arguments.only.split(",") if arguments.only else list(library_cases.FAMILIES)
    for family in chosen:
        for case in library_cases.FAMILIES[family]():
            entry = measure(case, arguments.rounds, bandwidth, rate)
            results["entries"][case.title] = entry
            if arguments.out:  # after every case: a run that is cut short leaves what it has
                pathlib.Path(arguments.out).write_text(json.dumps(results, indent=1) + "\n")
            del case
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
