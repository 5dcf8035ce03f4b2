"""Loads once what runs of a tile's rows share, where products take the tile through arithmetic.

    before: %w = load %p : 64x128, where eight rows in a run have one address: packed weights
    after:  %s = load %q : 8x128; %w = reshape (broadcast (expand_dims %s))

%q is made as %p is, of every eighth element. So an eighth of the bytes is copied ahead of the loop.
Requires: no layouts. Ensures: the same values; loads that products read as they come stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from minitriton.ir.axis_analysis import AxisFacts, analyse
from minitriton.ir.builder import Builder, i32_attr
from minitriton.ir.mlir import ir
from minitriton.ir.signs import is_non_negative
from minitriton.ir.target import Target
from minitriton.passes.dead_arguments import pass_through_dead_arguments
from minitriton.passes.loop_arguments import give_results, with_arguments, yield_also
from minitriton.passes.op_classes import is_elementwise, is_tile
from minitriton.passes.remarks import add_remark
from minitriton.passes.simplify import upstream
from minitriton.passes.tile_pass import PassOptions
from minitriton.passes.traversal import (
    Value,
    attributes_of,
    defining_op,
    int_array,
    int_attribute,
    integer_constant,
    kernel_of,
    splat_constant,
    terminator_of,
    walk,
)
from minitriton.passes.warpgroup_dots import is_pipelined, loop_load

Runs = tuple[int, ...]  # along each dimension, how many elements are equal
_SIGNED_DIVISIONS = ("arith.divsi", "arith.remsi")


def run(module: ir.Module, target: Target, options: PassOptions) -> None:
    """Rewrites the loads of the kernel that qualify."""
    if not options.pipeline_loads or not target.has("cp_async"):
        return
    function = kernel_of(module)
    loads = list(dict.fromkeys(_calculated_with(function)))
    if not loads:
        return
    facts = analyse(function)
    thinner = _Thinner(facts)
    changed = False
    for load in loads:
        runs = _equal_runs(load, facts)
        if prod(runs) > 1 and all(thinner.can(v, runs) for v in load.operands if is_tile(v)):
            shape = "x".join(str(n // run) for n, run in zip(_shape(load), runs, strict=True))
            add_remark(module, load, f"load of {shape} elements: others are equal to these")
            _replace(load, runs, thinner)
            changed = True
    thinner.finish()
    if changed:
        pass_through_dead_arguments(function.regions[0].blocks[0])
        upstream(module, options)


def _calculated_with(function: ir.Operation) -> Iterator[ir.Operation]:
    """Loads beside pipelined dots that operands are calculated from, each element by itself."""
    for dot in walk(function):
        if dot.name != "mt.dot" or not is_pipelined(dot):
            continue
        pending = [v for v in list(dot.operands)[:2] if loop_load(v, dot) is None]
        seen = set(pending)
        while pending:
            maker = defining_op(pending.pop())
            if maker is None or maker.block != dot.block:
                continue
            if maker.name == "mt.load":
                if len(_shape(maker)) > 1:
                    yield maker
            elif is_elementwise(maker.name) or maker.name == "mt.trans":
                following = [v for v in maker.operands if is_tile(v) and v not in seen]
                pending += following
                seen.update(following)


def _shape(op: ir.Operation) -> tuple[int, ...]:
    type_ = op.results[0].type
    return tuple(type_.shape) if isinstance(type_, ir.RankedTensorType) else ()


def _equal_runs(load: ir.Operation, facts: AxisFacts) -> Runs:
    """How many neighbours have one address, mask and value elsewhere; ones where that is open."""
    shape = _shape(load)
    runs = shape
    for value in load.operands:
        if is_tile(value) and splat_constant(defining_op(value)) is None:
            found = (
                facts.of(value).constancy if _divides_safely(value, facts) else (1,) * len(shape)
            )
            runs = tuple(map(min, runs, found))
    is_simple = all(n & (n - 1) == 0 for n in shape) and "volatile" not in load.attributes
    return runs if is_simple else (1,) * len(shape)


def _divides_safely(value: Value, facts: AxisFacts) -> bool:
    """Whether no division that makes equal neighbours, on the way to `value`, may have a negative
    dividend: quotients of such ones have longer runs around zero than the analysis says."""
    pending, seen = [value], {value}
    while pending:
        current = pending.pop()
        if isinstance(current, ir.BlockArgument):
            operands = _carried(current) or []
        else:
            op = current.owner.operation
            makes_runs = op.name in _SIGNED_DIVISIONS and _makes_runs(op, facts)
            if makes_runs and not is_non_negative(op.operands[0]):
                return False
            operands = [] if len(op.regions) else list(op.operands)
        following = [v for v in operands if is_tile(v) and v not in seen]
        pending += following
        seen.update(following)
    return True


def _makes_runs(division: ir.Operation, facts: AxisFacts) -> bool:
    before, after = (facts.of(v).constancy for v in (division.operands[0], division.results[0]))
    return any(a > b for a, b in zip(after, before, strict=True))


def _carried(argument: ir.BlockArgument) -> list[Value] | None:
    """What a value that a loop carries begins with, and what it is next; None for another one."""
    loop, index = argument.owner.owner.operation, argument.arg_number - 1
    if loop.name != "scf.for" or index < 0:
        return None
    return [loop.operands[3 + index], terminator_of(argument.owner).operands[index]]


def _replace(load: ir.Operation, runs: Runs, thinner: _Thinner) -> None:
    builder = Builder(ir.InsertionPoint(load), load.location)
    operands = [thinner.of(v, runs) if is_tile(v) else v for v in load.operands]
    attributes = attributes_of(load)
    attributes.pop("operandSegmentSizes", None)
    type_ = _thinned(load.results[0].type, runs)
    value = builder.op("mt.load", type_, operands, attributes)
    for dim, count in enumerate(runs):
        if count > 1:
            value = _repeated(value, dim, count, builder)
    load.results[0].replace_all_uses_with(value)
    load.erase()


def _thinned(type_: ir.Type, runs: Runs) -> ir.Type:
    shape = [n // count for n, count in zip(type_.shape, runs, strict=True)]
    return ir.RankedTensorType.get(shape, type_.element_type)


def _repeated(value: Value, dim: int, count: int, builder: Builder) -> Value:
    """Each element along `dim` so many times in a run."""
    shape, element = list(value.type.shape), value.type.element_type

    def typed(sizes: list[int]) -> ir.Type:
        return ir.RankedTensorType.get(sizes, element)

    before, own, after = shape[:dim], shape[dim], shape[dim + 1 :]
    if own > 1:
        axis = {"axis": i32_attr(dim + 1)}
        value = builder.op("mt.expand_dims", typed([*before, own, 1, *after]), (value,), axis)
        value = builder.op("mt.broadcast", typed([*before, own, count, *after]), (value,))
        return builder.op("mt.reshape", typed([*before, own * count, *after]), (value,))
    return builder.op("mt.broadcast", typed([*before, count, *after]), (value,))


class _Thinner:
    """Tiles of the first element of each run, made as the whole tile is made."""

    def __init__(self, facts: AxisFacts) -> None:
        self._facts = facts
        self._made: dict[tuple[Value, Runs], Value] = {}
        self._emptied: list[ir.Operation] = []  # loops; values refer to them until the end

    def can(self, value: Value, runs: Runs) -> bool:
        """Whether `of` knows all operations that make the value."""
        pending, seen = [(value, runs)], {(value, runs)}
        while pending:
            operands = _operands(*pending.pop())
            if operands is None:
                return False
            following = [pair for pair in operands if pair not in seen]
            pending += following
            seen.update(following)
        return True

    def of(self, value: Value, runs: Runs) -> Value:
        """Requires: can(value, runs)."""
        found = self._made.get((value, runs))
        if found is None:
            make = self._of_argument if isinstance(value, ir.BlockArgument) else self._of_result
            found = self._made[value, runs] = make(value, runs)
        return found

    def _of_argument(self, argument: ir.BlockArgument, runs: Runs) -> Value:
        loop, index = argument.owner.owner.operation, argument.arg_number - 1
        start = self.of(loop.operands[3 + index], runs)
        around, (made,) = with_arguments(loop, [start])
        give_results(loop, around)
        self._emptied.append(loop)
        self._made[argument, runs] = made
        end = terminator_of(around.regions[0].blocks[0])
        yield_also(around, [self.of(end.operands[index], runs)])
        return made

    def _is_multiple(self, value: Value, runs: Runs, divisor: int) -> bool:
        """Whether the tile of every so many-th element is a sum of multiples of `divisor`."""
        if isinstance(value, ir.BlockArgument):
            return False
        op = value.owner.operation
        if op.name == "mt.make_range":
            return int_attribute(op, "start") % divisor == runs[0] % divisor == 0
        if op.name == "mt.splat":
            return self._facts.of(op.operands[0]).multiple_at(0, 1) % divisor == 0
        number = integer_constant(value)
        if number is not None:
            return number % divisor == 0
        if op.name not in ("arith.addi", "mt.expand_dims", "mt.broadcast"):
            return False
        return all(self._is_multiple(*pair, divisor) for pair in _operands(value, runs) or ())

    def _quotient(self, value: Value, runs: Runs, divisor: int, builder: Builder) -> Value:
        """The thinned tile over `divisor`, term by term: it shows which elements are adjacent.
        Requires: _is_multiple(value, runs, divisor)."""
        op, type_ = value.owner.operation, _thinned(value.type, runs)
        if op.name == "mt.make_range":
            return _every(op, runs[0], divisor, builder)
        if op.name == "mt.splat":
            scalar = op.operands[0]
            by = builder.constant(scalar.type, divisor)
            return builder.op(
                "mt.splat", type_, (builder.op("arith.divsi", scalar.type, (scalar, by)),)
            )
        number = integer_constant(value)
        if number is not None:
            return builder.constant(type_, number // divisor)
        parts = [self._quotient(*p, divisor, builder) for p in _operands(value, runs) or ()]
        return builder.op(op.name, type_, parts, attributes_of(op))

    def finish(self) -> None:
        for loop in self._emptied:
            loop.erase()

    def _of_result(self, value: Value, runs: Runs) -> Value:
        op = value.owner.operation
        builder = Builder(ir.InsertionPoint(op), op.location)
        type_ = _thinned(value.type, runs)
        constant = splat_constant(op)
        if constant is not None:
            splat = ir.DenseElementsAttr.get_splat(type_, constant)
            return builder.op("arith.constant", type_, (), {"value": splat})
        if op.name == "mt.make_range":
            return _every(op, runs[0], 1, builder)
        if op.name == "arith.divsi":
            divisor = integer_constant(op.operands[1])
            if divisor and self._is_multiple(op.operands[0], runs, divisor):
                return self._quotient(op.operands[0], runs, divisor, builder)
        pairs = iter(_operands(value, runs) or ())
        operands = [self.of(*next(pairs)) if is_tile(v) else v for v in op.operands]
        return builder.op(op.name, type_, operands, attributes_of(op))


def _every(op: ir.Operation, count: int, divisor: int, builder: Builder) -> Value:
    """Every so many-th number of a mt.make_range, over `divisor`."""
    start, end = (int_attribute(op, name) for name in ("start", "end"))
    type_ = _thinned(op.results[0].type, (count,))
    bounds = {"start": i32_attr(0), "end": i32_attr((end - start) // count)}
    numbers = builder.op("mt.make_range", type_, (), bounds)
    step, first = (builder.constant(type_, n // divisor) for n in (count, start))
    return builder.op(
        "arith.addi", type_, (builder.op("arith.muli", type_, (numbers, step)), first)
    )


def _operands(value: Value, runs: Runs) -> list[tuple[Value, Runs]] | None:
    """The tiles that a thinned tile is made of, and how each is to be thinned; None where it cannot
    be made."""
    if isinstance(value, ir.BlockArgument):
        carried = _carried(value)
        return None if carried is None else [(v, runs) for v in carried]
    op = value.owner.operation
    if op.name == "arith.constant":
        return [] if splat_constant(op) is not None else None
    if op.name in ("mt.make_range", "mt.splat"):
        return []
    if op.name == "mt.expand_dims":
        axis = int_attribute(op, "axis")
        return [(op.operands[0], runs[:axis] + runs[axis + 1 :])]
    if op.name == "mt.broadcast":
        sizes = op.operands[0].type.shape
        return [
            (op.operands[0], tuple(1 if n == 1 else r for n, r in zip(sizes, runs, strict=True)))
        ]
    if op.name == "mt.trans":
        order = int_array(op, "order")
        given = dict(zip(order, runs, strict=True))
        return [(op.operands[0], tuple(given[dim] for dim in range(len(order))))]
    if is_elementwise(op.name) and not len(op.regions):
        return [(v, runs) for v in op.operands if is_tile(v)]
    return None
