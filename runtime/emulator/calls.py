"""Calls out of the kernel and small system instructions: vprintf, __assertfail, trap, nanosleep."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any

from minitriton.runtime.emulator.checks import AssertFailed, Trap
from minitriton.runtime.emulator.memory import error
from minitriton.runtime.emulator.module import LOCAL_WINDOW, Ins
from minitriton.runtime.emulator.operands import lanes_of
from minitriton.runtime.emulator.syntax import Group, Symbol

Step = Callable[[Any, Any], None]
_DIRECTIVE = re.compile(rb"%[-+ #0]*(\d+|\*)?(\.\d+)?(hh|h|ll|l|z|j|t)?([diouxXcsfFeEgGaAp%])")


def call(ins: Ins) -> Step:
    """call of vprintf or __assertfail; device functions were expanded before."""
    name = next((o.name for o in ins.ops if isinstance(o, Symbol)), "")
    groups = [o for o in ins.ops if isinstance(o, Group)]
    if name == "vprintf" and groups:
        slots = [item.value for item in groups[-1].items]
        result = groups[0].items[0].value if len(groups) > 1 else None
        return lambda c, ix: _printf(c, ix, slots, result)
    if name == "__assertfail" and groups:
        slots = [item.value for item in groups[-1].items]
        return lambda c, ix: _assert_failed(ins, c, ix, slots)
    raise ins.unsupported("indirect or external call")


def _slot(c: Any, lane: int, offset: int, size: int) -> int:
    at = int(c.local.base[lane]) + offset
    return int.from_bytes(c.local.bytes[at : at + size].tobytes(), "little")


def _printf(c: Any, ix: Any, slots: list[int], result: int | None) -> None:
    for lane in lanes_of(c, ix):
        lane = int(lane)
        text = c.globals.read_string(_slot(c, lane, slots[0], 8))
        arguments = _slot(c, lane, slots[1], 8)
        data = b""
        if arguments >> 56 == LOCAL_WINDOW >> 56:
            at = int(c.local.base[lane]) + (arguments & ((1 << 56) - 1))
            data = c.local.bytes[at : at + 1024].tobytes()
        c.print(format_c(text, data, c.globals.read_string))
    if result is not None:
        at = c.local.base[lanes_of(c, ix)] + result
        c.local.views[4][at >> 2] = 1
        if c.uninit is not None:
            c.uninit.stored_bytes(c.local, at, 4)


def format_c(text: bytes, data: bytes, read_string: Callable[[int], bytes]) -> str:
    """C's printf on the packed argument buffer of vprintf (natural alignment)."""
    at = 0

    def take(code: str) -> Any:
        nonlocal at
        size = struct.calcsize(code)
        at = (at + size - 1) // size * size
        value = struct.unpack_from("<" + code, data.ljust(at + size, b"\0"), at)[0]
        at += size
        return value

    def replace(match: re.Match[bytes]) -> bytes:
        kind = match[4].decode()
        if kind == "%":
            return b"%"
        spec = match[0].decode()
        if match[3]:
            spec = spec.replace(match[3].decode(), "")
        if match[1] == b"*":
            spec = spec.replace("*", str(take("i")))
        wide = match[3] in (b"l", b"ll", b"z", b"j", b"t")
        if kind in "fFeEgGaA":
            value = take("d")
            return (spec % value).encode() if kind not in "aA" else float(value).hex().encode()
        if kind == "s":
            return (spec % read_string(take("Q")).decode(errors="replace")).encode()
        if kind == "p":
            return hex(take("Q")).encode()
        if kind == "c":
            return chr(take("i") & 255).encode()
        value = take("q" if wide else "i") if kind in "di" else take("Q" if wide else "I")
        return (spec.replace("u", "d") % value).encode()

    return _DIRECTIVE.sub(replace, text).decode(errors="replace")


def _assert_failed(ins: Ins, c: Any, ix: Any, slots: list[int]) -> None:
    lanes = lanes_of(c, ix)
    lane = int(lanes[0])
    read = c.globals.read_string
    message, file, function = (
        read(_slot(c, lane, slots[k], 8)).decode(errors="replace") for k in (0, 1, 3)
    )
    line = _slot(c, lane, slots[2], 4)
    text = f"assertion failed: {message} ({file}:{line}, in {function})"
    facts = {"assertion": message, "file": file, "source_line": line, "function": function}
    raise error(AssertFailed, ins, c, lanes, text, **facts)


def trap(ins: Ins) -> Step:
    def run(c: Any, ix: Any) -> None:
        raise error(Trap, ins, c, lanes_of(c, ix), "the kernel executed trap")

    return run


def nothing(ins: Ins) -> Step:
    """nanosleep and brkpt: time does not pass here."""
    return lambda c, ix: None


def stacksave(ins: Ins) -> Step:
    raise ins.unsupported("dynamic stack allocation")


RULES: dict[str, Callable[[Ins], Step]] = {
    "call": call,
    "trap": trap,
    "nanosleep": nothing,
    "brkpt": nothing,
    "stacksave": stacksave,
    "stackrestore": stacksave,
    "alloca": stacksave,
}
