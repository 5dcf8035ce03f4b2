"""Operands as arrays: readers and writers of register rows, bound once per instruction.

A reader is callable(chunk, ix) -> raw bits, where ``ix`` is None (all lanes of the chunk) or an
index array of lanes; constants come back with shape (1,) and broadcast.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from minitriton.runtime.emulator.module import Ins, Reg, Sink, SReg
from minitriton.runtime.emulator.syntax import Immediate, Not

UNSIGNED = {1: np.dtype(bool), 8: np.dtype(np.uint8), 16: np.dtype(np.uint16),
            32: np.dtype(np.uint32), 64: np.dtype(np.uint64)}  # fmt: skip
SIGNED = {8: np.dtype(np.int8), 16: np.dtype(np.int16), 32: np.dtype(np.int32),
          64: np.dtype(np.int64)}  # fmt: skip

Reader = Callable[[Any, Any], np.ndarray]
Writer = Callable[[Any, Any, Any], None]


def constant_bits(operand: Immediate, bits: int, type_name: str = "") -> np.ndarray:
    """A literal as raw bits of ``bits`` width, shape (1,)."""
    value = operand.value
    if operand.kind == "f64" and bits == 32:
        number = struct.unpack("<d", struct.pack("<Q", value))[0]
        value = struct.unpack("<I", struct.pack("<f", number))[0]
    elif operand.kind == "f32" and bits == 64:
        number = struct.unpack("<f", struct.pack("<I", value))[0]
        value = struct.unpack("<Q", struct.pack("<d", number))[0]
    elif operand.kind == "i" and type_name in ("f32", "f64"):
        code = "<f" if bits == 32 else "<d"
        value = int.from_bytes(struct.pack(code, float(value)), "little")
    if bits == 1:
        return np.array([value != 0])
    return np.array([value & ((1 << bits) - 1)], UNSIGNED[bits])


def reader(ins: Ins, operand: Any, bits: int, type_name: str = "") -> Reader:
    """Read ``operand`` as ``bits``-wide raw bits (a wider register is truncated)."""
    if isinstance(operand, Reg):
        return _register_reader(ins, operand, bits)
    if isinstance(operand, Immediate):
        value = constant_bits(operand, bits, type_name)
        value.flags.writeable = False
        return lambda c, ix: value
    if isinstance(operand, SReg):
        name, dtype = operand.name, UNSIGNED[bits]

        def special(c: Any, ix: Any) -> np.ndarray:
            row = c.special(name)
            row = row if ix is None or len(row) == 1 else row[ix]
            return row if row.dtype == dtype else row.astype(dtype)

        return special
    if isinstance(operand, Not):
        inner = reader(ins, operand.operand, 1)
        return lambda c, ix: ~inner(c, ix)
    if isinstance(operand, Sink):
        value = np.zeros(1, UNSIGNED[bits])
        return lambda c, ix: value
    raise ins.unsupported(f"operand {operand!r}")


def _register_reader(ins: Ins, operand: Reg, bits: int) -> Reader:
    i = operand.index
    if operand.bits == bits:
        return lambda c, ix: c.rows[i] if ix is None else c.rows[i][ix]
    if operand.bits > bits > 1:
        dtype = UNSIGNED[bits]
        return lambda c, ix: (c.rows[i] if ix is None else c.rows[i][ix]).astype(dtype)
    raise ins.unsupported(f"register {operand.name} is {operand.bits} bits, {bits} needed")


def writer(ins: Ins, operand: Any, bits: int, signed: bool = False) -> Writer:
    """Write ``bits``-wide raw bits; a wider register is sign- or zero-extended."""
    if isinstance(operand, Sink):
        return lambda c, ix, value: None
    if not isinstance(operand, Reg):
        raise ins.unsupported(f"destination {operand!r}")
    i = operand.index
    if operand.bits < bits:
        raise ins.unsupported(f"register {operand.name} is {operand.bits} bits, {bits} needed")
    if operand.bits > bits and signed:
        narrow, wide = SIGNED[bits], UNSIGNED[operand.bits]
        middle = SIGNED[operand.bits]

        def extend(c: Any, ix: Any, value: Any) -> None:
            value = np.ascontiguousarray(value).view(narrow).astype(middle).view(wide)
            c.rows[i][... if ix is None else ix] = value

        return extend

    def write(c: Any, ix: Any, value: Any) -> None:
        c.rows[i][... if ix is None else ix] = value

    return write


def lanes_of(c: Any, ix: Any) -> np.ndarray:
    """The lane numbers that ``ix`` stands for."""
    return c.all_lanes if ix is None else ix
