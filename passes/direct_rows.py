"""Rows that every warp loads for itself, spread over its lanes.

    before: %r = load %p; convert_layout %r     after: %s = load %q; convert_layout %s

Where a producer warp copies the tiles, warps should not meet for a row of numbers: each has it in a
few registers until it is needed, then lanes exchange them. Requires: the addresses and the mask are
elementwise functions of ranges and scalars (`can_load_directly`).
"""

from __future__ import annotations

from minitriton.ir import layouts
from minitriton.ir.builder import Builder
from minitriton.ir.encoding import encode
from minitriton.ir.linear_layout import granule
from minitriton.ir.mlir import ir
from minitriton.passes.op_classes import is_elementwise, is_tile
from minitriton.passes.traversal import Value, attributes_of, defining_op, splat_constant

LANES = 32
_MADE_ANYWHERE = frozenset(("mt.make_range", "mt.splat"))


def can_load_directly(load: ir.Operation) -> bool:
    """Whether a load of rank 1 whose results all change layout can be made in another layout."""
    return len(load.results[0].type.shape) == 1 and all(map(_can_remake, load.operands))


def _can_remake(value: Value) -> bool:
    if not is_tile(value):
        return True
    op = defining_op(value)
    if op is None:
        return False
    if op.name == "arith.constant":
        return splat_constant(op) is not None
    if op.name in _MADE_ANYWHERE:
        return True
    return is_elementwise(op.name) and not len(op.regions) and all(map(_can_remake, op.operands))


def load_directly(load: ir.Operation, num_warps: int) -> None:
    """Makes every warp load all of the row."""
    (length,) = load.results[0].type.shape
    each = max(1, granule(length) // LANES)
    row = layouts.blocked((length,), (each,), (LANES,), (num_warps,), (0,))
    builder = Builder(ir.InsertionPoint(load), load.location)
    made: dict[Value, Value] = {}
    operands = [_remake(value, encode(row), made, builder) for value in load.operands]
    attributes = attributes_of(load)
    attributes.pop("operandSegmentSizes")
    type_ = _with_layout(load.results[0].type, encode(row))
    load.results[0].replace_all_uses_with(builder.op("mt.load", type_, operands, attributes))
    load.erase()


def _with_layout(type_: ir.Type, encoding: ir.Attribute) -> ir.Type:
    return ir.RankedTensorType.get(list(type_.shape), type_.element_type, encoding=encoding)


def _remake(
    value: Value, encoding: ir.Attribute, made: dict[Value, Value], builder: Builder
) -> Value:
    """`value` with another layout, at the builder's place."""
    if not is_tile(value):
        return value
    if value in made:
        return made[value]
    op = defining_op(value)
    assert op is not None, "checked before"
    type_ = _with_layout(value.type, encoding)
    if op.name == "arith.constant":
        scalar = splat_constant(op)
        found = ir.DenseElementsAttr.get_splat(type_, scalar)
        made[value] = builder.op("arith.constant", type_, (), {"value": found})
        return made[value]
    operands = [_remake(operand, encoding, made, builder) for operand in op.operands]
    made[value] = builder.op(op.name, type_, operands, attributes_of(op))
    return made[value]
