"""Times and checks: interleaved contenders, cold and warm L2, poisoned outputs, fresh inputs."""

from __future__ import annotations

import functools
import importlib.metadata
import math
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from minitriton.bench.cases import Trial
from minitriton.bench.roofline import Ceilings

FLUSH_BYTES = 256 << 20  # several times any L2
SPIN_HZ = 2.0e9  # at most what the clock of an SM runs at: a spin lasts at least as long as asked
PEERS = {"fla": "fla-core", "liger": "liger-kernel"}  # contender, its package
BLOCK_SECONDS, BLOCKS = 0.12, 3  # of back-to-back calls

Calls = dict[str, Callable[[], Any]]


class Clock:
    """Times on the GPU. Before each round the GPU spins while the host queues the whole round, so
    that no time of the host is in the results; where a call waited for the GPU it spins anew, so
    that only its own time has the host's. After the round the GPU rests for as long as it worked:
    rounds run at the clock of short bursts, `sustained` at that which power allows."""

    def __init__(self) -> None:
        self.flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        self.host: dict[str, float] = {}  # seconds that the last calls took the host

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def rounds(
        self, calls: Calls, *, cold: bool, most: int, seconds: float, restore: Calls | None = None
    ) -> dict[str, list[float]]:
        """Seconds of each call in up to `most` rounds, five at least, in an order that changes.
        What `restore` has by the name of a call runs before it, untimed."""
        times: dict[str, list[float]] = {name: [] for name in calls}
        spin, ends, order = 0.002, time.perf_counter() + seconds, list(calls)
        for number in range(most + 1):
            random.shuffle(order)
            woken = _spin(spin)
            begun, events = time.perf_counter(), {}
            for name in order:
                if woken.query():
                    woken = _spin(spin)
                before = (restore or {}).get(name, _nothing)
                events[name] = self._record(name, calls[name], before, cold)
            queued = time.perf_counter() - begun
            torch.cuda.synchronize()
            time.sleep(min(0.05, time.perf_counter() - begun))
            spin = min(0.1, max(spin, 1.5 * queued))
            if number:  # the first round told how long queueing takes
                for name, (start, end) in events.items():
                    times[name].append(start.elapsed_time(end) * 1e-3)
            if number >= 5 and time.perf_counter() > ends:
                break
        return times

    def _record(
        self, name: str, call: Callable[[], Any], before: Callable[[], Any], cold: bool
    ) -> tuple[Any, Any]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before()
        if cold:
            self.flush.zero_()
        else:
            call()
            before()
        start.record()
        begun = time.perf_counter()
        call()
        self.host[name] = time.perf_counter() - begun
        end.record()
        return start, end

    def sustained(self, calls: Calls, once: dict[str, float]) -> dict[str, list[float]]:
        """Seconds a call in blocks of back-to-back calls, at the clocks which power then allows. In
        an order that changes: a block begins with the heat of the one before."""
        times: dict[str, list[float]] = {name: [] for name in calls}
        order = list(calls)
        for number in range(BLOCKS + 1):
            random.shuffle(order)
            for name in order:
                call = calls[name]
                count = max(2, math.ceil(BLOCK_SECONDS / once[name]))
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                for _ in range(count):
                    call()
                end.record()
                torch.cuda.synchronize()
                if number:  # the first block warmed the chip
                    times[name].append(start.elapsed_time(end) * 1e-3 / count)
        return times


def _spin(seconds: float) -> Any:
    """Keeps the GPU from what is queued next for so long; an event at the end."""
    torch.cuda._sleep(int(seconds * SPIN_HZ))
    woken = torch.cuda.Event()
    woken.record()
    return woken


def _nothing() -> None:
    """Where nothing has to be restored."""


def summary(times: Sequence[float]) -> dict[str, float]:
    """Median and the quantiles at 20 and 80 percent."""
    ordered = sorted(times)
    at = lambda share: ordered[min(len(ordered) - 1, int(share * len(ordered)))]  # noqa: E731
    return {
        "median": statistics.median(ordered), "q20": at(0.2), "q80": at(0.8),
        "rounds": len(ordered),
    }  # fmt: skip


def find_ceilings(clock: Clock) -> Ceilings:
    """What this machine reaches now: memory both ways, L2, and cuBLAS by operand type."""

    def best(calls: Calls, *, cold: bool = True) -> dict[str, float]:
        found = clock.rounds(calls, cold=cold, most=12, seconds=1.0)
        return {name: statistics.median(times) for name, times in found.items()}

    x = torch.randn(1 << 29, device="cuda")
    y = torch.empty_like(x)
    times = best({"copy": lambda: y.copy_(x), "read": lambda: x.sum()})
    copy, read = 8 * x.numel() / times["copy"], 4 * x.numel() / times["read"]
    small, large = 4 << 18, 20 << 18  # elements: both copies lie within L2
    calls: Calls = {str(n): functools.partial(y[:n].copy_, x[:n]) for n in (small, large)}
    times = best(calls, cold=False)
    longer = times[str(large)] - times[str(small)]  # the difference is free of launches
    cached = 8 * (large - small) / longer if longer > 0 else copy
    return Ceilings(copy, read, cached, _find_rates(best))


def _find_rates(best: Callable[[Calls], dict[str, float]]) -> dict[str, float]:
    rates: dict[str, float] = {}
    one = torch.ones((), device="cuda")
    for size in (4096, 8192):
        a, b = (torch.randn(size, size, device="cuda") for _ in range(2))
        for name, dtype in (
            ("fp32", None), ("tf32", None), ("bf16", torch.bfloat16), ("fp16", torch.float16),
            ("fp8", torch.float8_e4m3fn),
        ):  # fmt: skip
            torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
            x, y = (a, b) if dtype is None else (a.to(dtype), b.to(dtype))
            if name == "fp8":
                try:
                    call = _fp8_product(x, y, one)
                    call()
                except (RuntimeError, ValueError):  # before sm_89
                    continue
            else:
                call = functools.partial(torch.matmul, x, y)
            rates[name] = max(rates.get(name, 0.0), 2.0 * size**3 / best({"": call})[""])
    torch.backends.cuda.matmul.allow_tf32 = False
    return rates


def _fp8_product(x: torch.Tensor, y: torch.Tensor, one: torch.Tensor) -> Callable[[], Any]:
    y = y.T.contiguous().T
    return lambda: torch._scaled_mm(
        x, y, one, one, out_dtype=torch.bfloat16, use_fast_accum=True
    )  # fmt: skip


def poisoned(trial: Trial, shapes: Sequence[tuple[Any, Any, Any]]) -> list[torch.Tensor]:
    """Results of a call whose outputs held NaN before. Memory that the call will allocate for
    itself is likely what was just filled and given back."""
    for out in trial.outputs:
        out.detach().fill_(math.nan)
    hold = [torch.full(shape, math.nan if dtype.is_floating_point else 85, dtype=dtype,
                       device=device) for shape, dtype, device in shapes]  # fmt: skip
    del hold
    return called(trial)


def called(trial: Trial) -> list[torch.Tensor]:
    """Results of a call on inputs as they should be."""
    if trial.restore is not None:
        trial.restore()
    return as_list(trial.call())


def as_list(results: Any) -> list[torch.Tensor]:
    return list(results) if isinstance(results, tuple | list) else [results]


def worst_error(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Largest relative rms error; infinite for NaN, a wrong shape or a wrong number of results."""
    if len(results) != len(expected):
        return math.inf
    worst = 0.0
    for result, wanted in zip(results, expected, strict=True):
        if result.numel() != wanted.numel():
            return math.inf
        wide = result.detach().float().reshape(wanted.shape)
        error = ((wide - wanted).norm() / wanted.norm()).item()
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def machine() -> dict[str, Any]:
    """What the numbers were measured on, and by which versions."""
    query = "name,driver_version,clocks.max.sm,clocks.max.mem,power.limit"
    found: dict[str, Any] = {}
    try:
        out = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        found |= zip(query.split(","), (v.strip() for v in out.stdout.split(",")), strict=False)
    except OSError:
        found["name"] = "no GPU"
    found["torch"] = torch.__version__
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        found["triton"] = "not installed"
    for key, package in PEERS.items():
        try:
            found[key] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[key] = "not installed"
    return found


def sm_clock() -> int | None:
    """MHz of the SMs now, if NVML tells."""
    try:
        return int(torch.cuda.clock_rate())
    except Exception:  # NVML's Python package is optional, and raises its own errors
        return None
