"""Builds operations at an insertion point with a location: thin, fast, for every room.

Generic `Operation.create` costs 1 us, the bindings' op classes up to 27 us, so all rooms use this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from minitriton.ir.dialect import MAX_VALUES
from minitriton.ir.mlir import ir

Value: TypeAlias = ir.Value


class Builder:
    """An insertion point and a location. Needs an entered context."""

    def __init__(self, ip: ir.InsertionPoint, loc: ir.Location | None = None) -> None:
        self.ip = ip
        self.loc = loc or ir.Location.unknown()

    @contextmanager
    def at(self, ip: ir.InsertionPoint, loc: ir.Location | None = None) -> Iterator[Builder]:
        """Moves to another place for a `with` block."""
        saved = self.ip, self.loc
        self.ip, self.loc = ip, loc or self.loc
        try:
            yield self
        finally:
            self.ip, self.loc = saved

    def create(
        self,
        name: str,
        results: Sequence[ir.Type],
        operands: Sequence[Value] = (),
        attributes: Mapping[str, ir.Attribute] | None = None,
        regions: int = 0,
    ) -> ir.Operation:
        """The operation itself."""
        attrs = dict(attributes) if attributes else None
        if name in OPERAND_GROUPS:
            attrs = (attrs or {}) | segment_sizes(name, len(operands), len(results))
        return ir.Operation.create(
            name, list(results), list(operands), attrs, None, regions, self.loc, self.ip
        )

    def op(
        self,
        name: str,
        result: ir.Type,
        operands: Sequence[Value] = (),
        attributes: Mapping[str, ir.Attribute] | None = None,
    ) -> Value:
        """The only result of a new operation."""
        return self.create(name, [result], operands, attributes).results[0]

    def constant(self, type_: ir.Type, value: int | float | bool) -> Value:
        """arith.constant of an integer or float scalar type, or a splat of a tensor type."""
        if isinstance(type_, ir.RankedTensorType):
            attribute = ir.DenseElementsAttr.get_splat(
                type_, scalar_attribute(type_.element_type, value)
            )
        else:
            attribute = scalar_attribute(type_, value)
        return self.op("arith.constant", type_, (), {"value": attribute})


# Ops whose operands (results) may differ in type and come in several groups: how many groups.
OPERAND_GROUPS = {
    "mt.load": 3, "mt.async_copy": 4, "mt.reduce": MAX_VALUES, "mt.scan": MAX_VALUES,
    "mt.yield": MAX_VALUES, "mt.print": MAX_VALUES, "mt.elementwise_asm": MAX_VALUES,
    "mt.effectful_asm": MAX_VALUES, "mt.map_elementwise": MAX_VALUES,
}  # fmt: skip
RESULT_GROUPS = {
    "mt.reduce": MAX_VALUES, "mt.scan": MAX_VALUES, "mt.elementwise_asm": MAX_VALUES,
    "mt.effectful_asm": MAX_VALUES, "mt.map_elementwise": MAX_VALUES,
}  # fmt: skip


def segment_sizes(name: str, operands: int, results: int) -> dict[str, ir.Attribute]:
    """The attributes that say how many values each operand and result group of an op has.

    ValueError for more values than the op has groups (more than MAX_VALUES results of a reduce).
    """
    sizes = {"operandSegmentSizes": _segments(OPERAND_GROUPS[name], operands, name)}
    if name in RESULT_GROUPS:
        sizes["resultSegmentSizes"] = _segments(RESULT_GROUPS[name], results, name)
    return sizes


def _segments(groups: int, count: int, name: str) -> ir.Attribute:
    if count > groups:
        raise ValueError(f"{name} takes at most {groups} values, not {count}")
    return ir.DenseI32ArrayAttr.get([1] * count + [0] * (groups - count))


def scalar_attribute(type_: ir.Type, value: int | float | bool) -> ir.Attribute:
    """IntegerAttr (two's complement, wrapped to the width) or FloatAttr."""
    if isinstance(type_, ir.IntegerType):
        width = type_.width
        wrapped = int(value) & ((1 << width) - 1)
        if width > 1 and wrapped >> (width - 1):
            wrapped -= 1 << width
        return ir.IntegerAttr.get(type_, -1 if width == 1 and wrapped else wrapped)
    if isinstance(type_, ir.IndexType):
        return ir.IntegerAttr.get(type_, int(value))
    return ir.FloatAttr.get(type_, float(value))


def i32_attr(value: int) -> ir.IntegerAttr:
    """An i32 integer attribute."""
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(32), value)
