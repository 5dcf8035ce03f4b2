"""PTX emulator: executes the PTX text MiniTriton emits, on numpy arrays.

`Emulator(ptx).launch(entry, grid=..., block=..., params=..., allocations=...)`; findings are
raised as `EmulatorError` subclasses.
"""

from minitriton.runtime.emulator.checks import (
    CHECKS,
    AssertFailed,
    Deadlock,
    DivergentAligned,
    EmulatorError,
    LaunchError,
    Misaligned,
    OutOfBounds,
    SharedRace,
    StepLimit,
    Trap,
    UninitialisedRead,
    UnsupportedPTX,
)
from minitriton.runtime.emulator.counters import Report
from minitriton.runtime.emulator.device import Emulator, parameter
from minitriton.runtime.emulator.memory import Allocation

__all__ = [
    "CHECKS",
    "Allocation",
    "AssertFailed",
    "Deadlock",
    "DivergentAligned",
    "Emulator",
    "EmulatorError",
    "LaunchError",
    "Misaligned",
    "OutOfBounds",
    "Report",
    "SharedRace",
    "StepLimit",
    "Trap",
    "UninitialisedRead",
    "UnsupportedPTX",
    "parameter",
]
