"""Contiguity, divisibility and constancy of every integer and pointer value of a tile function.

One forward walk, repeated over loop bodies until loop-carried facts are stable. Works before and
after layouts are assigned. Assumes, as Triton does, that signed index arithmetic does not overflow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minitriton.ir import axis_info
from minitriton.ir.axis_info import AxisInfo
from minitriton.ir.dialect import PtrType, element_of, shape_of
from minitriton.ir.linear_layout import hull
from minitriton.ir.mlir import ir
from minitriton.ir.types import bit_width

MAX_ROUNDS = 4  # over one loop before its arguments are given up


class AxisFacts:
    """Facts of the values of one function; values without an entry are floats or unknown."""

    def __init__(self) -> None:
        self._facts: dict[ir.Value, AxisInfo] = {}

    def of(self, value: ir.Value) -> AxisInfo:
        """The facts about `value` (of a tile: one entry per dimension)."""
        found = self._facts.get(value)
        return found if found is not None else _unknown(value.type)

    def set(self, value: ir.Value, info: AxisInfo) -> None:
        self._facts[value] = info

    def access_limits(self, op: ir.Operation) -> tuple[int, ...]:
        """Per dimension, elements that one aligned access of a memory op may cover.

        For load, store, atomics and async_copy on tiles: limited by the pointer's contiguity and
        alignment and by how long the mask stays equal, not by the layout or the 16-byte maximum.
        """
        pointer = self.of(op.operands[0])
        limits = [pointer.aligned_run(dim) for dim in range(pointer.rank)]
        mask = mask_of(op)
        if mask is not None:
            limits = list(map(min, limits, self.of(mask).constancy))
        return tuple(limits)

    def equal_runs(self, value: ir.Value) -> tuple[int, ...]:
        """Constancy of a tile that holds for negative dividends, too; ones where that is open."""
        constancy = self.of(value).constancy
        pending, seen = [value], {value}
        while pending and max(constancy) > 1:
            owner = pending.pop().owner
            if isinstance(owner, ir.Block):  # carried around a loop
                return (1,) * len(constancy)
            op = owner.operation
            if op.name in ("arith.divsi", "arith.remsi"):
                return (1,) * len(constancy)
            if op.name in RULES:  # others promise nothing
                tiles = {v for v in op.operands if shape_of(v.type) is not None}
                pending += tiles - seen
                seen |= tiles
        return constancy


FIRST_EXTRA = {
    "mt.load": 1, "mt.store": 2, "mt.async_copy": 2, "mt.atomic_rmw": 2, "mt.atomic_cas": 3,
}  # fmt: skip


def mask_of(op: ir.Operation) -> ir.Value | None:
    """The mask operand of a memory op."""
    operands, first = op.operands, FIRST_EXTRA[op.name]
    return operands[first] if len(operands) > first else None


def analyse(function: ir.Operation) -> AxisFacts:
    """Facts about all values of a func.func of tile IR."""
    facts = AxisFacts()
    block = function.regions[0].blocks[0]
    promises: list[Any] = [{}] * len(block.arguments)
    if "arg_attrs" in function.attributes:
        promises = list(function.attributes["arg_attrs"])
    for index, argument in enumerate(block.arguments):
        promised = 1
        if "mt.divisibility" in promises[index]:
            promised = ir.IntegerAttr(promises[index]["mt.divisibility"]).value
        unit = _unit(argument.type)
        divisibility = axis_info.power_of_two_in(promised)
        facts.set(argument, AxisInfo((1,), (divisibility,), (1,), None, unit))
    _visit_block(block, facts)
    return facts


def _unit(type_: ir.Type) -> int:
    element = element_of(type_)
    if isinstance(element, PtrType):
        return max(1, bit_width(element.pointee) // 8)
    return 1


def _unknown(type_: ir.Type) -> AxisInfo:
    shape = shape_of(type_)
    return AxisInfo.unknown(1 if shape is None else len(shape), _unit(type_))


def _visit_block(block: ir.Block, facts: AxisFacts) -> None:
    for view in block.operations:
        op = view.operation
        name = op.name
        rule = RULES.get(name)
        if rule is not None:
            facts.set(op.results[0], rule(op, [facts.of(v) for v in op.operands]))
        elif name in REGIONS:
            REGIONS[name](op, facts)


def _visit_for(op: ir.Operation, facts: AxisFacts) -> None:
    body = op.regions[0].blocks[0]
    lower, _, step, *inits = op.operands
    arguments = list(body.arguments)
    start, by = facts.of(lower), facts.of(step)
    divisibility = min(start.multiple_at(0, 1), by.multiple_at(0, 1))
    facts.set(arguments[0], AxisInfo((1,), (divisibility,), (1,)))
    current = [facts.of(init) for init in inits]
    for round_ in range(MAX_ROUNDS + 1):
        if round_ == MAX_ROUNDS:
            current = [_unknown(init.type) for init in inits]
        for argument, info in zip(arguments[1:], current, strict=True):
            facts.set(argument, info)
        _visit_block(body, facts)
        yielded = [facts.of(v) for v in _terminator(body).operands]
        merged = [a.meet(b) for a, b in zip(current, yielded, strict=True)]
        if merged == current:
            break
        current = merged
    for result, info in zip(op.results, current, strict=True):
        facts.set(result, info)


def _visit_if(op: ir.Operation, facts: AxisFacts) -> None:
    yielded = []
    for region in op.regions:
        for block in region.blocks:
            _visit_block(block, facts)
            yielded.append([facts.of(v) for v in _terminator(block).operands])
    for index, result in enumerate(op.results):
        facts.set(result, yielded[0][index].meet(yielded[1][index]))


def _visit_while(op: ir.Operation, facts: AxisFacts) -> None:
    for region in op.regions:  # loop-carried values stay unknown
        _visit_block(region.blocks[0], facts)


def _terminator(block: ir.Block) -> ir.Operation:
    return block.operations[len(block.operations) - 1].operation


REGIONS = {"scf.for": _visit_for, "scf.if": _visit_if, "scf.while": _visit_while}

# Rules: (op, facts of the operands) -> facts of the result


def _constant(op: ir.Operation, _: list[AxisInfo]) -> AxisInfo:
    type_ = op.results[0].type
    if not isinstance(element_of(type_), ir.IntegerType):
        return _whole(type_)
    value = op.attributes["value"]
    if isinstance(type_, ir.RankedTensorType):
        value = ir.DenseElementsAttr(value)
        if not value.is_splat:
            return _unknown(type_)
        value = value.get_splat_value()
    number = ir.IntegerAttr(value).value
    return AxisInfo.of_constant(number, shape_of(type_) or (1,))


def _whole(type_: ir.Type) -> AxisInfo:
    """All elements equal, nothing else known."""
    shape = shape_of(type_) or (1,)
    ones = (1,) * len(shape)
    return AxisInfo(ones, ones, tuple(map(hull, shape)), None, _unit(type_))


def _make_range(op: ir.Operation, _: list[AxisInfo]) -> AxisInfo:
    start = ir.IntegerAttr(op.attributes["start"]).value
    (size,) = op.results[0].type.shape
    return AxisInfo((hull(size),), (axis_info.power_of_two_in(start),), (1,))


def _splat(op: ir.Operation, operands: list[AxisInfo]) -> AxisInfo:
    (source,) = operands
    shape = tuple(map(hull, op.results[0].type.shape))
    rank = len(shape)
    return AxisInfo((1,) * rank, source.divisibility * rank, shape, source.constant, source.unit)


def _expand_dims(op: ir.Operation, operands: list[AxisInfo]) -> AxisInfo:
    (source,) = operands
    axis = ir.IntegerAttr(op.attributes["axis"]).value

    def insert(values: tuple[int, ...], new: int) -> tuple[int, ...]:
        return (*values[:axis], new, *values[axis:])

    return AxisInfo(
        insert(source.contiguity, 1),
        insert(source.divisibility, source.everywhere()),
        insert(source.constancy, 1),
        source.constant,
        source.unit,
    )


def _broadcast(op: ir.Operation, operands: list[AxisInfo]) -> AxisInfo:
    (source,) = operands
    old, new = shape_of(op.operands[0].type) or (), shape_of(op.results[0].type) or ()
    constancy = tuple(
        hull(n) if o == 1 else k for o, n, k in zip(old, new, source.constancy, strict=True)
    )
    return AxisInfo(source.contiguity, source.divisibility, constancy, source.constant, source.unit)


def _trans(op: ir.Operation, operands: list[AxisInfo]) -> AxisInfo:
    (source,) = operands
    order = list(ir.DenseI32ArrayAttr(op.attributes["order"]))

    def permute(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(values[d] for d in order)

    return AxisInfo(
        permute(source.contiguity), permute(source.divisibility), permute(source.constancy),
        source.constant, source.unit,
    )  # fmt: skip


def _reshape(op: ir.Operation, operands: list[AxisInfo]) -> AxisInfo:
    """Facts along the last dimension carry over; along the others only what holds everywhere."""
    (source,) = operands
    shape = tuple(map(hull, op.results[0].type.shape))
    rest = len(shape) - 1
    if source.constancy == tuple(map(hull, op.operands[0].type.shape)):
        everywhere = source.everywhere()
        return AxisInfo(
            (1,) * (rest + 1), (everywhere,) * (rest + 1), shape, source.constant, source.unit
        )
    contiguity = min(source.contiguity[-1], shape[-1])
    return AxisInfo(
        (1,) * rest + (contiguity,),
        (source.everywhere(),) * rest + (source.multiple_at(source.rank - 1, contiguity),),
        (1,) * rest + (min(source.constancy[-1], shape[-1]),),
        None,
        source.unit,
    )


def _same(op: ir.Operation, operands: list[AxisInfo]) -> AxisInfo:
    return operands[0]


def _truncate(op: ir.Operation, operands: list[AxisInfo]) -> AxisInfo:
    """Only runs that cannot wrap around in the narrow type stay runs."""
    (source,) = operands
    limit = 1 << max(0, bit_width(element_of(op.results[0].type)) - 1)
    contiguity = tuple(min(source.aligned_run(d), limit) for d in range(source.rank))
    divisibility = tuple(source.multiple_at(d, c) for d, c in enumerate(contiguity))
    return AxisInfo(contiguity, divisibility, source.constancy)


def _unsigned_extend(op: ir.Operation, operands: list[AxisInfo]) -> AxisInfo:
    """A negative constant changes its value; the other facts hold modulo a power of two."""
    (source,) = operands
    negative = source.constant is not None and source.constant < 0
    run = tuple(source.aligned_run(d) for d in range(source.rank))
    return AxisInfo(
        run,
        tuple(source.multiple_at(d, c) for d, c in enumerate(run)),
        source.constancy,
        None if negative else source.constant,
    )


def _recast_pointer(op: ir.Operation, operands: list[AxisInfo]) -> AxisInfo:
    """Bytes per element may change, and with them what contiguous means."""
    (source,) = operands
    unit = _unit(op.results[0].type)
    if unit == source.unit:
        return source
    everywhere = tuple(source.multiple_at(d, 1) for d in range(source.rank))
    return AxisInfo((1,) * source.rank, everywhere, source.constancy, None, unit)


def _hint(op: ir.Operation, operands: list[AxisInfo]) -> AxisInfo:
    (source,) = operands
    promised = {
        name: tuple(ir.DenseI64ArrayAttr(op.attributes[name]))
        if name in op.attributes
        else (1,) * source.rank
        for name in ("contiguity", "divisibility", "constancy")
    }
    contiguity = promised["contiguity"]
    divisibility = tuple(axis_info.power_of_two_in(v) for v in promised["divisibility"])
    facts = AxisInfo(
        tuple(map(max, source.contiguity, map(axis_info.power_of_two_in, contiguity))),
        source.divisibility,
        tuple(map(max, source.constancy, map(axis_info.power_of_two_in, promised["constancy"]))),
        source.constant,
        source.unit,
    )
    # the promise is about group starts of the value as promised; at longer groups it still holds
    divisibility = tuple(
        max(source.multiple_at(d, c), divisibility[d]) for d, c in enumerate(facts.contiguity)
    )
    return AxisInfo(facts.contiguity, divisibility, facts.constancy, source.constant, source.unit)


def _shift(fn: Callable[[AxisInfo, AxisInfo], AxisInfo]) -> Callable[[Any, Any], AxisInfo]:
    def rule(op: ir.Operation, operands: list[AxisInfo]) -> AxisInfo:
        value, amount = operands
        width = bit_width(element_of(op.results[0].type))
        if amount.constant is None or not 0 <= amount.constant < width - 1:
            ones = (1,) * value.rank
            return AxisInfo(ones, ones, tuple(map(min, value.constancy, amount.constancy)))
        return fn(value, AxisInfo.of_constant(1 << amount.constant, amount.constancy))

    return rule


def _binary(fn: Callable[[AxisInfo, AxisInfo], AxisInfo]) -> Callable[[Any, Any], AxisInfo]:
    return lambda _, operands: fn(operands[0], operands[1])


def _compare(op: ir.Operation, operands: list[AxisInfo]) -> AxisInfo:
    predicate = ir.IntegerAttr(op.attributes["predicate"]).value
    return axis_info.compare(operands[0], operands[1], predicate)


def _constancy_only(op: ir.Operation, operands: list[AxisInfo]) -> AxisInfo:
    """A pure function of its operands element by element."""
    ones = (1,) * operands[0].rank
    constancy = tuple(min(ks) for ks in zip(*(o.constancy for o in operands), strict=True))
    return AxisInfo(ones, ones, constancy, None, _unit(op.results[0].type))


def _select(op: ir.Operation, operands: list[AxisInfo]) -> AxisInfo:
    condition, lhs, rhs = operands
    scalar = shape_of(op.operands[0].type) is None
    return axis_info.select(None if scalar else condition, lhs, rhs)


RULES: dict[str, Callable[[ir.Operation, list[AxisInfo]], AxisInfo]] = {
    "arith.constant": _constant,
    "mt.make_range": _make_range,
    "mt.splat": _splat,
    "mt.expand_dims": _expand_dims,
    "mt.broadcast": _broadcast,
    "mt.trans": _trans,
    "mt.reshape": _reshape,
    "mt.convert_layout": _same,
    "mt.hint": _hint,
    "mt.addptr": _binary(axis_info.add),
    "mt.ptr_cast": _recast_pointer,
    "arith.addi": _binary(axis_info.add),
    "arith.subi": _binary(axis_info.subtract),
    "arith.muli": _binary(axis_info.multiply),
    "arith.divsi": _binary(axis_info.divide),
    "arith.divui": _binary(axis_info.divide),
    "arith.remsi": _binary(axis_info.remainder),
    "arith.remui": _binary(axis_info.remainder),
    "arith.shli": _shift(axis_info.multiply),
    "arith.shrsi": _shift(axis_info.divide),
    "arith.shrui": _shift(axis_info.divide),
    "arith.andi": _binary(axis_info.bit_and),
    "arith.ori": _binary(axis_info.pointwise),
    "arith.xori": _binary(axis_info.pointwise),
    "arith.minsi": _binary(axis_info.pointwise),
    "arith.maxsi": _binary(axis_info.pointwise),
    "arith.minui": _binary(axis_info.pointwise),
    "arith.maxui": _binary(axis_info.pointwise),
    "arith.cmpi": _compare,
    "arith.cmpf": _constancy_only,
    "arith.select": _select,
    "arith.extsi": _same,
    "arith.extui": _unsigned_extend,
    "arith.trunci": _truncate,
    "arith.index_cast": _same,
}
for _name in ("addf", "subf", "mulf", "divf", "negf", "extf", "truncf", "sitofp", "fptosi"):
    RULES[f"arith.{_name}"] = _constancy_only
