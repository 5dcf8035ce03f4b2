"""What the emulator can object to: error classes, findings, and the checks that can be chosen.

Each error carries the rule's id, the PTX line, the Python position from ``.loc`` and examples of
the CTAs, warps and lanes involved. The shared-memory race detector is in races.py.
"""

from __future__ import annotations

from typing import Any

Location = tuple[str, int, int]

#: Checks a caller can select. Out-of-bounds accesses and deadlocks cannot be survived, so these
#: two always stop a launch whether or not they are named.
CHECKS: dict[str, str] = {
    "oob": "accesses outside registered allocations, shared, local and parameter memory",
    "uninit": "use of registers and of shared or local bytes that were never written",
    "race": "conflicting accesses to shared memory, or to registers of wgmma, that nothing orders",
    "align": "warp-wide instructions executed by part of the warp they name",
    "deadlock": "barriers that can never complete",
}


class EmulatorError(Exception):
    """A kernel did something wrong, or something the emulator does not support.

    Attributes: ``rule`` (stable id), ``ptx_line`` (1-based, 0 if unknown), ``python_location``
    ((file, line, column) or None), ``details`` (dict with ``examples`` and rule-specific facts).
    """

    rule = "error"

    def __init__(
        self,
        message: str,
        *,
        line: int = 0,
        location: Location | None = None,
        hint: str = "",
        details: dict[str, Any] | None = None,
    ) -> None:
        self.message = message
        self.ptx_line = line
        self.python_location = location
        self.hint = hint
        self.details = details or {}
        super().__init__(self._render())

    def _render(self) -> str:
        parts = [f"{self.rule}: {self.message}"]
        if self.python_location:
            file, line, column = self.python_location
            parts.append(f"  at {file}:{line}:{column}")
        if self.ptx_line:
            text = self.details.get("ptx", "")
            parts.append(f"  PTX line {self.ptx_line}" + (f": {text}" if text else ""))
        if examples := self.details.get("examples"):
            parts.append("  by " + "; ".join(str(e) for e in examples))
        if self.hint:
            parts.append(f"  = help: {self.hint}")
        return "\n".join(parts)


class UnsupportedPTX(EmulatorError):
    rule = "unsupported-ptx"


class OutOfBounds(EmulatorError):
    rule = "out-of-bounds"


class Misaligned(EmulatorError):
    rule = "misaligned"


class UninitialisedRead(EmulatorError):
    rule = "uninitialised-read"


class SharedRace(EmulatorError):
    rule = "shared-race"


class RegisterRace(EmulatorError):
    rule = "register-race"


class DivergentAligned(EmulatorError):
    rule = "divergent-aligned"


class Deadlock(EmulatorError):
    rule = "deadlock"


class MbarrierMisuse(EmulatorError):
    rule = "mbarrier"


class BadTensorMap(EmulatorError):
    rule = "tensor-map"


class RegisterPool(EmulatorError):
    rule = "register-pool"


class StepLimit(EmulatorError):
    rule = "step-limit"


class LaunchError(EmulatorError):
    rule = "launch"


class Trap(EmulatorError):
    rule = "trap"


class AssertFailed(Trap):
    rule = "assert-failed"


def selected(checks: tuple[str, ...] | str) -> frozenset[str]:
    """The set of checks named by ``checks`` ("all", or names); an unknown name is an error."""
    if checks == "all":
        return frozenset(CHECKS)
    names = (checks,) if isinstance(checks, str) else tuple(checks)
    for name in names:
        if name not in CHECKS:
            raise LaunchError(
                f"unknown check {name!r}", hint=f"choose from {', '.join(CHECKS)} or 'all'"
            )
    return frozenset(names)
