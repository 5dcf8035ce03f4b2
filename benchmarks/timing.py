"""Interleaved timing of several contenders on the GPU.

Every round times each contender once, in an order that changes, after writing a buffer larger than
L2; the median over rounds is reported. Outputs are checked by the caller before and after.
"""

import random
import statistics
from collections.abc import Callable

import torch

FLUSH_BYTES = 256 << 20


def compare(contenders: dict[str, Callable[[], object]], rounds: int = 30) -> dict[str, float]:
    """Median seconds of each contender, L2 cold, after three warm-up calls each."""
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    for call in contenders.values():
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    for _ in range(rounds):
        random.shuffle(order)
        events = {}
        for name in order:
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            contenders[name]()
            end.record()
            events[name] = (start, end)
        torch.cuda.synchronize()
        for name, (start, end) in events.items():
            times[name].append(start.elapsed_time(end) * 1e-3)
    return {name: statistics.median(values) for name, values in times.items()}


def machine() -> dict[str, str]:
    """What the numbers were measured on."""
    import subprocess

    query = "name,driver_version,clocks.sm,clocks.mem,power.limit"
    out = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = dict(zip(query.split(","), (v.strip() for v in out.stdout.split(",")), strict=False))
    found["torch"] = torch.__version__
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        found["triton"] = "not installed"
    return found
