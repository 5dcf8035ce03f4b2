"""Timing and comparing kernels: `do_bench` on a GPU (or by wall clock), `assert_close`, tables."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from minitriton.perf_report import Benchmark, Mark, perf_report
from minitriton.runtime import driver
from minitriton.sizes import cdiv, next_power_of_2

ReturnMode = Literal["mean", "median", "min", "max", "all"]
_FLUSH_BYTES = 256 << 20  # more than any L2


def do_bench(
    fn: Callable[[], Any],
    warmup: float = 25,
    rep: float = 100,
    grad_to_none: Sequence[Any] | None = None,
    quantiles: Sequence[float] | None = None,
    return_mode: ReturnMode = "mean",
) -> Any:
    """Milliseconds that `fn()` takes on the GPU, with a cold L2 before each run.

    `warmup` and `rep` are budgets in milliseconds. `quantiles` asks for a list of them, else
    `return_mode` says what single number (or with "all", which list) comes back. Without a GPU the
    wall clock is used. ValueError for an unknown mode or a quantile outside 0 to 1.
    """
    if return_mode not in ("mean", "median", "min", "max", "all"):
        raise ValueError(f"return_mode must be mean, median, min, max or all, not {return_mode!r}")
    if quantiles is not None and not all(0 <= q <= 1 for q in quantiles):
        raise ValueError(f"quantiles must be within 0 and 1: {list(quantiles)}")
    measure = _gpu_times if driver.is_available() else _wall_times
    times = measure(fn, warmup, rep, grad_to_none or ())
    if quantiles is not None:
        found = [_quantile(times, q) for q in quantiles]
        return found[0] if len(found) == 1 else found
    match return_mode:
        case "all":
            return times
        case "mean":
            return statistics.fmean(times)
        case "median":
            return statistics.median(times)
        case "min":
            return min(times)
        case "max":
            return max(times)


def _gpu_times(
    fn: Callable[[], Any], warmup: float, rep: float, gradients: Sequence[Any]
) -> list[float]:
    import torch

    fn()
    torch.cuda.synchronize()
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def event() -> Any:
        return torch.cuda.Event(enable_timing=True)

    begin, end = event(), event()
    begin.record()
    for _ in range(5):
        flush.zero_()
        fn()
    end.record()
    torch.cuda.synchronize()
    estimate = max(begin.elapsed_time(end) / 5, 1e-3)
    for _ in range(max(1, int(warmup / estimate))):
        fn()
    pairs = [(event(), event()) for _ in range(max(1, int(rep / estimate)))]
    for first, second in pairs:
        for tensor in gradients:
            tensor.grad = None
        flush.zero_()
        first.record()
        fn()
        second.record()
    torch.cuda.synchronize()
    return [float(first.elapsed_time(second)) for first, second in pairs]


def _wall_times(
    fn: Callable[[], Any], warmup: float, rep: float, gradients: Sequence[Any]
) -> list[float]:
    deadline = time.perf_counter() + warmup / 1e3
    fn()
    while time.perf_counter() < deadline:
        fn()
    times: list[float] = []
    while not times or sum(times) < rep:
        for tensor in gradients:
            tensor.grad = None
        begun = time.perf_counter()
        fn()
        times.append((time.perf_counter() - begun) * 1e3)
    return times


def _quantile(times: Sequence[float], q: float) -> float:
    """Linear interpolation between the closest ranks."""
    ordered = sorted(times)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def assert_close(
    x: Any, y: Any, atol: float | None = None, rtol: float | None = None, err_msg: str = ""
) -> None:
    """AssertionError unless the arrays agree within `atol + rtol * abs(y)`; NaN equals NaN.

    Takes torch tensors, NumPy arrays and numbers. Defaults: 1e-2 and 0, as in Triton.
    """
    import numpy as np

    atol, rtol = 1e-2 if atol is None else atol, 0.0 if rtol is None else rtol
    left, right = _to_numpy(x), _to_numpy(y)
    if left.size > 1 or right.size > 1:
        np.testing.assert_allclose(
            left, right, atol=atol, rtol=rtol, equal_nan=True, err_msg=err_msg
        )
    elif not np.allclose(left, right, atol=atol, rtol=rtol, equal_nan=True):
        raise AssertionError(f"{err_msg} {left} is not close to {right} ({atol=}, {rtol=})".strip())


def _to_numpy(value: Any) -> Any:
    import numpy as np

    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if str(value.dtype) in ("torch.bfloat16", "torch.float8_e4m3fn", "torch.float8_e5m2"):
            value = value.float()
        value = value.numpy()
    return np.asarray(value)


__all__ = [
    "Benchmark",
    "Mark",
    "assert_close",
    "cdiv",
    "do_bench",
    "next_power_of_2",
    "perf_report",
]
