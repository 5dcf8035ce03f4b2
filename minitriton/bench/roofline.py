"""Arithmetic of the roofline: what a piece of work needs at least, and what cannot be true."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

RATES = ("fp32", "tf32", "bf16", "fp16", "fp8")
# How far a result may pass the ceiling measured in the same run: kernels can be a little better
# than the library call that made the ceiling, and clocks move. Beyond it the measurement is wrong.
BANDWIDTH_SLACK, CACHED_SLACK, RATE_SLACK = 1.05, 1.25, 1.10


class AboveRoof(Exception):
    """A time that the hardware cannot reach: the measurement or its accounting is wrong."""


@dataclass(frozen=True)
class Work:
    """What a case must do: bytes that move once, floating-point operations, and in which units."""

    bytes: float
    flop: float
    rate: str = "fp32"

    def __post_init__(self) -> None:
        if self.rate not in RATES or self.bytes <= 0 or self.flop <= 0:
            raise ValueError(f"no work to measure: {self}")

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.flop / self.bytes


@dataclass(frozen=True)
class Ceilings:
    """Best rates seen on this machine in this run, per second."""

    copy: float  # bytes read and written by a device-to-device copy
    read: float  # bytes of a reduction
    cached: float  # bytes read and written within L2, estimated
    rates: dict[str, float] = field(default_factory=dict)  # FLOP by operand type

    def bandwidth(self, *, warm: bool = False) -> float:
        """The slope of the roof. A warm L2 holds a part or all of what moves."""
        return max(self.copy, self.cached) if warm else self.copy

    def roof(self, work: Work, *, warm: bool = False) -> float:
        """Attainable FLOP per second."""
        return min(self.rates[work.rate], work.intensity * self.bandwidth(warm=warm))

    def floor(self, work: Work, *, warm: bool = False) -> float:
        """Shortest time in seconds."""
        return work.flop / self.roof(work, warm=warm)

    def bound(self, work: Work) -> str:
        """What limits the work when L2 is cold: "memory" or "compute"."""
        slope = work.intensity * self.copy
        return "memory" if slope < self.rates[work.rate] else "compute"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def fraction(work: Work, seconds: float, ceilings: Ceilings, *, warm: bool = False) -> float:
    """Share of the roof that was reached; AboveRoof if that is impossible."""
    moving = work.bytes / ceilings.bandwidth(warm=warm)
    computing = work.flop / ceilings.rates[work.rate]
    # a case that only reads may pass the copy ceiling up to that of reading
    least = work.bytes / max(ceilings.bandwidth(warm=warm), ceilings.read)
    least /= CACHED_SLACK if warm else BANDWIDTH_SLACK
    if seconds < least or seconds < computing / RATE_SLACK:
        raise AboveRoof(
            f"{seconds * 1e6:.1f} us is above the roof: {work.bytes / 1e6:.1f} MB take "
            f"{moving * 1e6:.1f} us and {work.flop / 1e9:.1f} GFLOP in {work.rate} "
            f"{computing * 1e6:.1f} us at the ceilings measured in this run"
        )
    return max(moving, computing) / seconds
