"""fp32 products on tensor cores: each operand as a sum of two or three tf32 or bf16 numbers.

tf32x3 and bf16x3 leave out the product of the low parts, bf16x6 the three smallest of nine.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from minitriton.codegen.emit import attribute
from minitriton.codegen.lower import Lowering
from minitriton.codegen.mma import MmaKind, mma_instruction
from minitriton.ir.layouts import MmaTile
from minitriton.ir.mlir import ir

Accumulators: TypeAlias = dict[tuple[int, ...], list[ir.Value]]
Parts: TypeAlias = tuple[list[ir.Value], ...]  # words of a fragment: high, then lower parts

TRUNCATED = 3.85e-8  # of a sum of tf32 products, on average: measured on an H200


@dataclass(frozen=True)
class _Form:
    """The instruction, into how many parts operands are split, and which products of parts of A
    and B (0: high) are added, smallest first, before the large one."""

    kind: MmaKind
    bits: int
    count: int
    small: tuple[tuple[int, int], ...]
    lost: float = 0.0


_BF16 = MmaKind("bf16", "bf16", 16)
_FORMS = {
    "tf32x3": _Form(MmaKind("tf32", "tf32", 8), 32, 2, ((1, 0), (0, 1)), TRUNCATED),
    "bf16x3": _Form(_BF16, 16, 2, ((1, 0), (0, 1))),
    "bf16x6": _Form(_BF16, 16, 3, ((1, 1), (2, 0), (0, 2), (1, 0), (0, 1))),
}
BITS = {precision: form.bits for precision, form in _FORMS.items()}  # of the instruction's elements


def multiply(
    lowering: Lowering,
    op: ir.Operation,
    precision: str,
    tiles: Sequence[MmaTile],
    accumulators: Accumulators,
) -> None:
    """Adds the products of the parts; all but the large ones are left out where infinities made
    their sum meaningless.

    Tensor cores truncate what they add up, so the large products of each instruction are added in
    fp32 (Ootomo and Yokota, arXiv 2203.03341), and the mean of what it truncates, always towards
    zero, goes with the small products, which can be one sum. The accumulator gets the sum of all,
    which is more exact than one product after another. Of operands and sums, the order keeps fewer
    in registers.
    """
    form = _FORMS[precision]
    mma = mma_instruction(lowering, form.kind, lowering.f32)
    zeros = [lowering.zero(lowering.f32)] * 4
    lost = lowering.constant(lowering.f32, form.lost) if form.lost else None
    large: Accumulators = {}
    small = dict.fromkeys(accumulators, zeros)

    @functools.cache
    def parts(operand: int, registers: tuple[int, ...]) -> Parts:
        values = pick(lowering, op.operands[operand], registers)
        split = _tf32_parts if form.bits == 32 else _bf16_parts
        return split(lowering, values, form.count)

    def add(total: list[ir.Value], part: list[ir.Value]) -> list[ir.Value]:
        return [lowering.binary("addf", x, y) for x, y in zip(total, part, strict=True)]

    def take(tile: MmaTile) -> None:
        a, b, c = parts(0, tile.a), parts(1, tile.b), tile.c
        part = mma(a[0], b[0], zeros)
        large[c] = add(large[c], part) if c in large else part
        rest = small[c]
        if lost is not None:
            rest = [
                lowering.op("math.fma", lowering.f32, (x, lost, y))
                for x, y in zip(part, rest, strict=True)
            ]
        for i, j in form.small:
            rest = mma(a[i], b[j], rest)
        small[c] = rest

    def finish(c: tuple[int, ...]) -> None:
        rest = [_finite_or_zero(lowering, value) for value in small[c]]
        accumulators[c] = add(add(accumulators[c], rest), large[c])

    many = len(accumulators) ** 2 > len(tiles)  # more accumulators than steps
    for tile in sorted(tiles, key=lambda tile: tile.c) if many else tiles:
        take(tile)
        if many and tile.k == tiles[-1].k:
            finish(tile.c)
    if not many:
        for c in list(accumulators):
            finish(c)


def pick(lowering: Lowering, value: ir.Value, registers: Sequence[int]) -> list[ir.Value]:
    """Some registers of a tile."""
    source = lowering.registers(value)
    return [source[register] for register in registers]


def to_tf32(lowering: Lowering, value: ir.Value) -> ir.Value:
    """An f32 rounded to tf32 (to nearest, ties away from zero), as an i32 word."""
    attributes = {
        "rnd": attribute("#nvvm.fp_rnd_mode<rna>"),
        "sat": attribute("#nvvm.sat_mode<none>"),
        "relu": ir.BoolAttr.get(False),
    }
    return lowering.op("nvvm.convert.float.to.tf32", lowering.i32, (value,), attributes)


def _tf32_parts(lowering: Lowering, values: Sequence[ir.Value], count: int) -> Parts:
    """f32 registers rounded to tf32, and what that lost, rounded likewise, ..."""
    found = [[to_tf32(lowering, value) for value in values]]
    while len(found) < count:
        values = [
            lowering.binary("subf", value, lowering.bitcast(word, lowering.f32))
            for value, word in zip(values, found[-1], strict=True)
        ]
        found.append([to_tf32(lowering, value) for value in values])
    return tuple(found)


def _bf16_parts(lowering: Lowering, values: Sequence[ir.Value], count: int) -> Parts:
    """The same in bf16, two to a word."""
    pair, wide = (ir.VectorType.get([2], t) for t in (lowering.bf16, lowering.f32))
    rests = [lowering.pack(values[i : i + 2]) for i in range(0, len(values), 2)]
    found: list[list[ir.Value]] = []
    for _ in range(count):
        rounded = [lowering.op("arith.truncf", pair, (rest,)) for rest in rests]
        found.append([lowering.bitcast(value, lowering.i32) for value in rounded])
        rests = [
            lowering.binary("subf", rest, lowering.op("arith.extf", wide, (value,)))
            for rest, value in zip(rests, rounded, strict=True)
        ]
    return tuple(found)


def _finite_or_zero(lowering: Lowering, value: ir.Value) -> ir.Value:
    magnitude = lowering.and_(lowering.bitcast(value, lowering.i32), 0x7FFFFFFF)
    finite = lowering.compare("ult", magnitude, 0x7F800000)
    return lowering.select(finite, value, lowering.zero(lowering.f32))
