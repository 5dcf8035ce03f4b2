"""Shape ops: a result register is an operand's register under another number; nothing is emitted
but the coordinates of make_range."""

from __future__ import annotations

from collections.abc import Sequence

from minitriton.codegen.lower import Lowering, integer_attribute
from minitriton.ir.encoding import layout_of
from minitriton.ir.mlir import ir
from minitriton.ir.register_maps import (
    broadcast_registers,
    cat_registers,
    flip_registers,
    join_registers,
    narrow_registers,
    split_registers,
)


class Renamed(Sequence[ir.Value]):
    """Registers picked from operands; reading one reads only that operand register."""

    def __init__(
        self, sources: Sequence[Sequence[ir.Value]], picks: Sequence[tuple[int, int]]
    ) -> None:
        self._sources = sources
        self._picks = picks

    def __len__(self) -> int:
        return len(self._picks)

    def __getitem__(self, index: int) -> ir.Value:  # type: ignore[override]  # never sliced
        operand, register = self._picks[index]
        return self._sources[operand][register]


def rename(
    lowering: Lowering,
    result: ir.Value,
    operands: Sequence[ir.Value],
    picks: Sequence[tuple[int, int]],
) -> None:
    """Result register i is register picks[i][1] of operand picks[i][0]."""
    lowering.set_registers(result, Renamed([lowering.registers(v) for v in operands], picks))


def lower_make_range(lowering: Lowering, op: ir.Operation) -> None:
    layout = layout_of(op.results[0].type)
    start = integer_attribute(op, "start")

    def make(register: int) -> ir.Value:
        coordinate = lowering.coordinate(layout, 0, register)
        return lowering.add(coordinate, start) if start else coordinate

    lowering.set_registers(op.results[0], lowering.lazy(layout.num_registers, make))


def lower_splat(lowering: Lowering, op: ir.Operation) -> None:
    count = layout_of(op.results[0].type).num_registers
    lowering.set_registers(op.results[0], [lowering.scalar(op.operands[0])] * count)


def lower_unsplat(lowering: Lowering, op: ir.Operation) -> None:
    lowering.set_registers(op.results[0], [lowering.registers(op.operands[0])[0]])


def lower_same_registers(lowering: Lowering, op: ir.Operation) -> None:
    """expand_dims, reshape, trans: every register keeps its number."""
    lowering.set_registers(op.results[0], lowering.registers(op.operands[0]))


def lower_broadcast(lowering: Lowering, op: ir.Operation) -> None:
    source, result = op.operands[0].type, op.results[0].type
    widened = [d for d, (a, b) in enumerate(zip(source.shape, result.shape, strict=True)) if a != b]
    if not widened:
        return lower_same_registers(lowering, op)
    picks = [(0, r) for r in broadcast_registers(layout_of(result), widened)]
    return rename(lowering, op.results[0], op.operands, picks)


def lower_join(lowering: Lowering, op: ir.Operation) -> None:
    count = len(lowering.registers(op.operands[0]))
    rename(lowering, op.results[0], op.operands, join_registers(count))


def lower_cat(lowering: Lowering, op: ir.Operation) -> None:
    picks = cat_registers(layout_of(op.operands[0].type), integer_attribute(op, "axis"))
    rename(lowering, op.results[0], op.operands, picks)


def lower_flip_blocks(lowering: Lowering, op: ir.Operation) -> None:
    registers = flip_registers(layout_of(op.operands[0].type), integer_attribute(op, "axis"))
    rename(lowering, op.results[0], op.operands, [(0, r) for r in registers])


def lower_narrow(lowering: Lowering, op: ir.Operation) -> None:
    axis, start = integer_attribute(op, "axis"), integer_attribute(op, "start")
    source, size = layout_of(op.operands[0].type), op.results[0].type.shape[axis]
    picks = [(0, r) for r in narrow_registers(source, axis, size, start)]
    rename(lowering, op.results[0], op.operands, picks)


def lower_split(lowering: Lowering, op: ir.Operation) -> None:
    halves = split_registers(layout_of(op.operands[0].type))
    for result, registers in zip(op.results, halves, strict=True):
        rename(lowering, result, op.operands, [(0, r) for r in registers])


RULES = {
    "mt.make_range": lower_make_range,
    "mt.splat": lower_splat,
    "mt.unsplat": lower_unsplat,
    "mt.expand_dims": lower_same_registers,
    "mt.reshape": lower_same_registers,
    "mt.trans": lower_same_registers,
    "mt.broadcast": lower_broadcast,
    "mt.join": lower_join,
    "mt.cat": lower_cat,
    "mt.flip_blocks": lower_flip_blocks,
    "mt.narrow": lower_narrow,
    "mt.split": lower_split,
}
