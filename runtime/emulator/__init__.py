"""PTX emulator: executes the PTX text MiniTriton emits, on numpy arrays.

`Emulator(ptx).launch(entry, grid=..., block=..., params=..., allocations=...)`; findings are
raised as `EmulatorError` subclasses.
"""

from minitriton.runtime.emulator.checks import (
    CHECKS,
    AssertFailed,
    BadTensorMap,
    Deadlock,
    DivergentAligned,
    EmulatorError,
    LaunchError,
    MbarrierMisuse,
    Misaligned,
    OutOfBounds,
    RegisterPool,
    RegisterRace,
    SharedRace,
    StepLimit,
    Trap,
    UninitialisedRead,
    UnsupportedPTX,
)
from minitriton.runtime.emulator.counters import Report
from minitriton.runtime.emulator.device import Emulator, parameter
from minitriton.runtime.emulator.memory import Allocation
from minitriton.runtime.tensor_map import TensorMap

__all__ = [
    "CHECKS",
    "Allocation",
    "AssertFailed",
    "BadTensorMap",
    "Deadlock",
    "DivergentAligned",
    "Emulator",
    "EmulatorError",
    "LaunchError",
    "MbarrierMisuse",
    "Misaligned",
    "OutOfBounds",
    "RegisterPool",
    "RegisterRace",
    "Report",
    "SharedRace",
    "StepLimit",
    "TensorMap",
    "Trap",
    "UninitialisedRead",
    "UnsupportedPTX",
    "parameter",
]
