"""Between which numbers the elements of an integer value of tile IR lie, read as signed numbers.

A walk backwards over the operations that make the value, of a bounded depth. What may leave the
range of its type counts as any number of that type.
"""

from __future__ import annotations

from collections.abc import Callable

from minitriton.ir.dialect import element_of
from minitriton.ir.mlir import ir

Range = tuple[int, int]  # the least and the greatest

DEEPEST = 16  # operations that are looked through
_MOVES = frozenset((
    "mt.convert_layout", "mt.broadcast", "mt.expand_dims", "mt.reshape", "mt.trans", "mt.splat",
))  # fmt: skip


def range_of(value: ir.Value, depth: int = DEEPEST) -> Range:
    """The least and the greatest number that an element can be."""
    whole = _of_type(value)
    if depth == 0 or isinstance(value, ir.BlockArgument):
        return whole
    op = value.owner.operation
    if op.name == "arith.constant":
        return _of_constant(op, whole)
    if op.name in _MOVES:
        return range_of(op.operands[0], depth - 1)
    rule = _RULES.get(op.name)
    if rule is None:
        return whole
    found = rule(*(range_of(operand, depth - 1) for operand in op.operands), _width(op.operands[0]))
    return found if found and whole[0] <= found[0] and found[1] <= whole[1] else whole


def unsigned(found: Range, width: int) -> Range:
    """The range of the same bits as numbers without a sign."""
    return found if found[0] >= 0 else (0, 2**width - 1)


def _width(value: ir.Value) -> int:
    return int(element_of(value.type).width)


def _of_type(value: ir.Value) -> Range:
    half = 2 ** (_width(value) - 1)
    return -half, half - 1


def _of_constant(op: ir.Operation, whole: Range) -> Range:
    attribute = op.attributes["value"]
    if isinstance(op.results[0].type, ir.RankedTensorType):
        dense = ir.DenseElementsAttr(attribute)
        if not dense.is_splat:
            return whole
        attribute = dense.get_splat_value()
    number = ir.IntegerAttr(attribute).value
    return number, number


def _hull(*numbers: int) -> Range:
    return min(numbers), max(numbers)


def _and(a: Range, b: Range, _: int) -> Range | None:
    tops = [high for low, high in (a, b) if low >= 0]
    return (0, min(tops)) if tops else None


def _or(a: Range, b: Range, _: int) -> Range | None:
    if min(a[0], b[0]) < 0:
        return None
    return 0, 2 ** max(a[1], b[1]).bit_length() - 1


def _shift_left(a: Range, by: Range, _: int) -> Range | None:
    return (a[0] << by[0], a[1] << by[0]) if by[0] == by[1] and 0 <= by[0] < 64 else None


def _shift_right(a: Range, by: Range, _: int) -> Range:
    if by[0] == by[1] and by[0] >= 0:
        return a[0] >> by[0], a[1] >> by[0]
    return min(a[0], 0), max(a[1], 0)


def _shift_right_unsigned(a: Range, by: Range, width: int) -> Range:
    return _shift_right(unsigned(a, width), by, width)


def _remainder(a: Range, b: Range, _: int) -> Range | None:
    if b[0] != b[1] or b[0] <= 0:
        return None
    return (1 - b[0] if a[0] < 0 else 0), b[0] - 1


def _remainder_unsigned(a: Range, b: Range, width: int) -> Range | None:
    return _remainder(unsigned(a, width), b, width)


def _quotient(a: Range, b: Range, _: int) -> Range | None:
    """Toward zero."""
    if b[0] != b[1] or b[0] <= 0:
        return None
    low, high = (abs(end) // b[0] * (-1 if end < 0 else 1) for end in a)
    return low, high


def _quotient_unsigned(a: Range, b: Range, width: int) -> Range | None:
    return _quotient(unsigned(a, width), b, width)


_RULES: dict[str, Callable[..., Range | None]] = {
    "arith.addi": lambda a, b, _: (a[0] + b[0], a[1] + b[1]),
    "arith.subi": lambda a, b, _: (a[0] - b[1], a[1] - b[0]),
    "arith.muli": lambda a, b, _: _hull(*(x * y for x in a for y in b)),
    "arith.andi": _and,
    "arith.ori": _or,
    "arith.xori": _or,
    "arith.shli": _shift_left,
    "arith.shrsi": _shift_right,
    "arith.shrui": _shift_right_unsigned,
    "arith.divsi": _quotient,
    "arith.divui": _quotient_unsigned,
    "arith.remsi": _remainder,
    "arith.remui": _remainder_unsigned,
    "arith.minsi": lambda a, b, _: (min(a[0], b[0]), min(a[1], b[1])),
    "arith.maxsi": lambda a, b, _: (max(a[0], b[0]), max(a[1], b[1])),
    "arith.select": lambda _, a, b, __: _hull(*a, *b),
    "arith.extsi": lambda a, _: a,
    "arith.extui": unsigned,
    "arith.trunci": lambda a, _: a,
}
