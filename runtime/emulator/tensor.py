"""mma.sync on raw registers of whole warps, and the fragment maps of the matrix moves.

Products are exact and a whole instruction is summed in float64, then rounded once to the
accumulator's type. Tensor cores align addends to the largest and truncate, so hardware differs
from this by up to k * 2**-22 * sum(|a * b|); integers and f64 (to one rounding per fma) agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from minitriton.runtime.emulator import minifloat
from minitriton.runtime.emulator.formats import F32, F64, FORMATS, canonical_f32, narrow, to_f32
from minitriton.runtime.emulator.fragments import (
    a_positions,
    b_positions,
    c_elements,
    ldmatrix_gather,
    movmatrix,
    stmatrix_scatter,
)

Registers: TypeAlias = NDArray[Any]
_PACKED = {"f64": 1, "tf32": 1, "f16": 2, "bf16": 2, "s8": 4, "u8": 4, "e4m3": 4, "e5m2": 4}
_SHAPES = {
    "f64": ("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16"),
    "tf32": ("m16n8k4", "m16n8k8"),
    "f16": ("m16n8k8", "m16n8k16"),
    "bf16": ("m16n8k8", "m16n8k16"),
    "s8": ("m8n8k16", "m16n8k16", "m16n8k32"),
    "u8": ("m8n8k16", "m16n8k16", "m16n8k32"),
    "e4m3": ("m16n8k16", "m16n8k32"),
    "e5m2": ("m16n8k16", "m16n8k32"),
}
_ACCUMULATORS = {
    "f64": ("f64",), "tf32": ("f32",), "f16": ("f16", "f32"), "bf16": ("f32",),
    "s8": ("s32",), "u8": ("s32",), "e4m3": ("f16", "f32"), "e5m2": ("f16", "f32"),
}  # fmt: skip
_FAMILIES = ({"f64"}, {"tf32"}, {"f16"}, {"bf16"}, {"s8", "u8"}, {"e4m3", "e5m2"})
TF32_MASK = np.uint32(0xFFFFE000)


def operand_values(registers: Registers, ptx_type: str) -> NDArray[np.float64]:
    """Registers [n, warps, 32] to float64 values [warps, n * 32 * packed], packed items last."""
    raw = np.ascontiguousarray(registers)
    if ptx_type == "f64":
        values = raw.view(F64)
    elif ptx_type == "tf32":  # the low 13 bits of the register are ignored
        values = (raw & TF32_MASK).view(F32)
    elif ptx_type in ("f16", "bf16"):
        values = to_f32(raw.view(np.uint16), ptx_type)
    elif ptx_type in minifloat.NAMES:
        values = minifloat.decode(raw.view(np.uint8), ptx_type)
    else:
        values = raw.view(np.int8 if ptx_type == "s8" else np.uint8)
    ordered = np.moveaxis(values, 0, 1)
    return ordered.reshape(ordered.shape[0], -1).astype(F64)


def _accumulator_in(registers: Registers, ptx_type: str, index: NDArray[np.intp], size: int) -> Any:
    """Accumulator registers [n, warps, 32] to [warps, rows * columns] numbers."""
    raw = np.ascontiguousarray(registers)
    if ptx_type == "f16":  # [pair, warps, lane, half]
        values = raw.view(np.float16).reshape(*raw.shape, 2).astype(F64)
        ordered = np.moveaxis(values, 1, 0)
    else:
        kind = {"f64": F64, "f32": F32, "s32": np.dtype(np.int32)}[ptx_type]
        values = raw.view(kind).reshape(raw.shape[0] // 2, 2, *raw.shape[1:])
        ordered = values.transpose(2, 0, 3, 1).astype(np.int64 if ptx_type == "s32" else F64)
    matrix = np.empty((ordered.shape[0], size), ordered.dtype)
    matrix[:, index.reshape(-1)] = ordered.reshape(ordered.shape[0], -1)
    return matrix


def _accumulator_out(matrix: Any, ptx_type: str, index: NDArray[np.intp]) -> Registers:
    """[warps, rows * columns] numbers to accumulator registers [n, warps, 32]."""
    picked = np.moveaxis(matrix[:, index], 0, 1)  # [pair, warps, lane, 2]
    if ptx_type == "f16":
        halves = np.ascontiguousarray(narrow(picked, FORMATS["f16"]))
        return halves.view(np.uint32)[..., 0]
    planes = np.ascontiguousarray(np.moveaxis(picked, 3, 1))
    registers = planes.reshape(-1, *planes.shape[2:])
    if ptx_type == "f64":
        return registers.view(np.uint64)
    if ptx_type == "s32":
        return registers.astype(np.int32).view(np.uint32)
    return canonical_f32(registers.astype(F32))


def mma_sync(
    shape: str,
    a_type: str,
    b_type: str,
    c_type: str,
    d_type: str,
    layouts: tuple[str, str] = ("row", "col"),
    satfinite: bool = False,
) -> Callable[[Registers, Registers, Registers], Registers]:
    """Resolve mma.sync.aligned.{shape}.row.col to callable(a, b, c) -> d.

    Register arrays are uint32 (uint64 for f64) of shape [registers, warps, 32]. ValueError for a
    combination that the PTX ISA does not have.
    """
    _check(shape, a_type, b_type, c_type, d_type, layouts)
    rows, columns, depth = (
        int(part) for part in shape[1:].replace("n", " ").replace("k", " ").split()
    )
    packed = _PACKED[a_type]
    a_index, b_index = a_positions(rows, depth, packed), b_positions(depth, columns, packed)
    c_index = c_elements(rows, columns)
    limits = np.iinfo(np.int32)

    # [register, lane] -> element, for accumulators that take a register each
    c_order = np.ascontiguousarray(c_index.transpose(0, 2, 1)).reshape(-1, 32)
    kind = {"f64": F64, "f32": F32, "s32": np.dtype(np.int32)}.get(d_type)

    def run(a: Registers, b: Registers, c: Registers) -> Registers:
        left = operand_values(a, a_type)[:, a_index]
        right = operand_values(b, b_type)[:, b_index]
        product = np.matmul(left, right).reshape(len(left), rows * columns)
        if kind is None or c_type != d_type:  # fp16 accumulators, two to a register
            addend = _accumulator_in(c, c_type, c_index, rows * columns)
            return _accumulator_out(product + addend, d_type, c_index)
        fragment = product[:, c_order].transpose(1, 0, 2)
        if d_type == "s32":
            total = fragment.astype(np.int64) + c.view(np.int32)
            total = np.clip(total, limits.min, limits.max) if satfinite else total
            return total.astype(np.int32).view(np.uint32)
        total = np.ascontiguousarray(fragment + c.view(kind))
        return total.view(np.uint64) if d_type == "f64" else canonical_f32(total.astype(F32))

    return run


def _check(
    shape: str, a_type: str, b_type: str, c_type: str, d_type: str, layouts: tuple[str, str]
) -> None:
    name = f"mma.sync.{shape}.{'.'.join(layouts)}.{d_type}.{a_type}.{b_type}.{c_type}"
    allowed = (
        a_type in _SHAPES
        and shape in _SHAPES[a_type]
        and any({a_type, b_type} <= family for family in _FAMILIES)
        and c_type in _ACCUMULATORS[a_type]
        and d_type in _ACCUMULATORS[a_type]
        and tuple(layouts) == ("row", "col")
    )
    if not allowed:
        raise ValueError(f"the emulator has no rule for {name}")


__all__ = ["ldmatrix_gather", "mma_sync", "movmatrix", "operand_values", "stmatrix_scatter"]
