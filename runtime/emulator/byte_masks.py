"""Which bytes of a register are undefined, where instructions only move bytes about.

LLVM packs narrow values into wider registers whose other bytes nobody writes, and picks the right
ones out again; only tracking by byte tells that from a real mistake. A mask has bit i for byte i.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minitriton.runtime.emulator.module import Ins, Reg
from minitriton.runtime.emulator.syntax import Immediate, Vector

ALL = 0xFF
MaskOf = Callable[[Any], np.ndarray]  # operand -> uint8 by lane, or of length 1


def type_bytes(type_name: str) -> int:
    """Bytes of a PTX type such as "b32" or "f16x2"; 8 where the name says nothing."""
    number, _, count = type_name.lstrip("abcdefghijklmnopqrstuvwyz").partition("x")
    if not number.isdigit():
        return 8
    return max(int(number) * int(count or 1) // 8, 1)


def moved(ins: Ins, mask_of: MaskOf) -> list[np.ndarray] | None:
    """Masks of the destination's registers; None for an instruction that does more than move."""
    rule = _RULES.get(ins.op)
    return None if rule is None else rule(ins, mask_of)


def _low(count: int) -> int:
    return (1 << min(count, 8)) - 1


def _mov(ins: Ins, mask_of: MaskOf) -> list[np.ndarray] | None:
    dest, source = ins.ops[:2]
    if isinstance(source, Vector):
        width, mask = type_bytes(ins.type) // len(source.items), np.zeros(1, np.uint8)
        for i, item in enumerate(source.items):
            mask = mask | (mask_of(item) & _low(width)) << width * i
        return [mask]
    mask = mask_of(source)
    if isinstance(dest, Vector):
        width = type_bytes(ins.type) // len(dest.items)
        parts = enumerate(dest.items)
        return [mask >> width * i & _low(width) for i, item in parts if isinstance(item, Reg)]
    return [mask]


def _prmt(ins: Ins, mask_of: MaskOf) -> list[np.ndarray] | None:
    a, b, selector = ins.ops[1:4]
    if not isinstance(selector, Immediate) or len(ins.mods) != 1:
        return None
    both = mask_of(a) & 15 | (mask_of(b) & 15) << 4
    mask = np.zeros(1, np.uint8)
    for i in range(4):  # bit 3 of a nibble asks for the sign of the byte: the same byte counts
        mask = mask | (both >> (selector.value >> 4 * i & 7) & 1) << i
    return [mask]


def _cvt(ins: Ins, mask_of: MaskOf) -> list[np.ndarray] | None:
    if len(ins.mods) != 2 or any(m[0] not in "us" for m in ins.mods):
        return None
    wide, narrow = (type_bytes(m) for m in ins.mods)
    mask = mask_of(ins.ops[1]) & _low(narrow)
    if wide > narrow and ins.type[0] == "s":
        mask = mask | (mask >> narrow - 1 & 1) * np.uint8(ALL & ~_low(narrow))
    return [mask & _low(wide)]


def _shift(ins: Ins, mask_of: MaskOf) -> list[np.ndarray] | None:
    amount = ins.ops[2]
    if not isinstance(amount, Immediate) or amount.value % 8 or not 0 <= amount.value < 64:
        return None
    count, width, mask = amount.value // 8, type_bytes(ins.type), mask_of(ins.ops[1])
    if ins.op == "shl":
        return [mask << count & _low(width)]
    if ins.type[0] == "s" and count:
        mask = mask | (mask >> width - 1 & 1) * np.uint8(ALL & ~_low(width))
    return [(mask if ins.type[0] == "s" else mask & _low(width)) >> count & _low(width)]


def _bitwise(ins: Ins, mask_of: MaskOf) -> list[np.ndarray] | None:
    if ins.type == "pred":
        return None
    mask = np.zeros(1, np.uint8)
    for operand in ins.ops[1:]:
        mask = mask | mask_of(operand)
    decided = {"and": 0, "or": 0xFF}.get(ins.op)  # a byte of this value decides the result
    for operand in ins.ops[1:]:
        if isinstance(operand, Immediate) and decided is not None:
            known = [operand.value >> 8 * i & 0xFF == decided for i in range(8)]
            mask = mask & np.uint8(sum((not k) << i for i, k in enumerate(known)))
    return [mask]


def _bfi(ins: Ins, mask_of: MaskOf) -> list[np.ndarray] | None:
    source, base, position, length = ins.ops[1:5]
    if not isinstance(position, Immediate) or not isinstance(length, Immediate):
        return None
    if position.value % 8 or length.value % 8 or not 0 <= position.value < 64:
        return None
    at, count = position.value // 8, min(length.value // 8, 8)
    place = _low(count) << at & ALL
    inserted = mask_of(source) << at & place
    return [(mask_of(base) & (ALL - place) | inserted) & _low(type_bytes(ins.type))]


def _mul(ins: Ins, mask_of: MaskOf) -> list[np.ndarray] | None:
    factor = ins.ops[2]
    if not isinstance(factor, Immediate) or ins.type[0] not in "us" or "hi" in ins.mods:
        return None
    count, rest = divmod(factor.value.bit_length() - 1, 8)
    if rest or factor.value != 256**count or (ins.type[0] == "s" and "wide" in ins.mods):
        return None  # anything but a move by whole bytes
    width = type_bytes(ins.type)
    mask = mask_of(ins.ops[1]) & _low(width)
    return [mask << count & _low(2 * width if "wide" in ins.mods else width)]


_RULES: dict[str, Callable[[Ins, MaskOf], list[np.ndarray] | None]] = {
    "mov": _mov, "prmt": _prmt, "cvt": _cvt, "shl": _shift, "shr": _shift,
    "and": _bitwise, "or": _bitwise, "xor": _bitwise, "not": _bitwise,
    "bfi": _bfi, "mul": _mul,
}  # fmt: skip
