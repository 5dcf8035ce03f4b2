"""Interleaved timing of several contenders on the GPU.

Every round times each contender once, in an order that changes, after writing a buffer larger than
L2; the median over rounds is reported. Outputs are checked by the caller before and after.
"""

import random
import statistics
from collections.abc import Callable

import torch

from minitriton.bench.measure import FLUSH_BYTES, machine

__all__ = ["compare", "machine"]


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
