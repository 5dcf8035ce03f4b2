"""Turns dots for wgmma, which takes only A from registers: what it cannot read as B becomes A.

    before: for (%acc) { %acc = dot %a, %b, %acc }
    after:  for (%t = trans %acc) { %t = dot (trans %b), (trans %a), %t }; trans %t

That is for a B that is made in the loop, of weights in fewer bits say, beside an A that is loaded;
and for tf32 and bytes, of which B has to lie along the depth, where only A does.
Marks (`warpgroup_dots.ORIENTED`) dots that warpgroups can make, also those that were right as they
are; ADJACENT_ROWS where A is stored along M, so that threads take neighbouring rows of it. A trans
of a tile with a layout moves nothing.
Requires: no layouts. Ensures: the same meaning; remarks say which dots stay on mma.sync and why.
"""

from __future__ import annotations

from dataclasses import dataclass

from minitriton.ir.axis_analysis import AxisFacts, analyse
from minitriton.ir.builder import Builder
from minitriton.ir.dialect import element_of
from minitriton.ir.mlir import ir
from minitriton.ir.target import Target
from minitriton.passes.affine import ONE, AffineAnalysis
from minitriton.passes.dead_arguments import pass_through_dead_arguments
from minitriton.passes.loop_arguments import give_results, with_arguments, yield_also
from minitriton.passes.products_in_flight import ACCUMULATOR
from minitriton.passes.remarks import add_remark
from minitriton.passes.simplify import upstream
from minitriton.passes.tensor_maps import NotAffine
from minitriton.passes.tensor_maps import plan as plan_map
from minitriton.passes.tile_pass import PassOptions
from minitriton.passes.traversal import (
    Value,
    attributes_of,
    defining_op,
    int_attribute,
    kernel_of,
    splat_constant,
    terminator_of,
    walk,
)
from minitriton.passes.warpgroup_dots import (
    ADJACENT_ROWS,
    ORIENTED,
    available,
    is_only_multiplied,
    is_oriented_kind,
    is_pipelined,
    loop_load,
    tile_fits,
)

WORD_BYTES = 4  # what threads copy at least
LEAST_TURNED = 64  # rows of a dot whose B is in registers: at 16, mma.sync is as fast on an H200


@dataclass(frozen=True)
class _Plan:
    """What to do with a dot: exchange its operands; read A along its rows; mark it (`ORIENTED`)."""

    dot: ir.Operation
    swaps: bool
    adjacent: bool
    marked: bool = True


class _Refused(Exception):
    """A dot stays on mma.sync; the message says why."""


def run(module: ir.Module, target: Target, options: PassOptions) -> None:
    """Turns and marks the dots of the kernel that qualify."""
    function = kernel_of(module)
    if not available(function, target, options):
        return
    dots = [op for op in walk(function) if op.name == "mt.dot" and _may_turn(op)]
    if not dots:
        return
    warps = int_attribute(module.operation, "mt.num_warps", 4)
    entry = function.regions[0].blocks[0]
    choice = _Choice(analyse(function), AffineAnalysis(entry), warps, options.tma)
    plans = []
    for dot in dots:
        try:
            if (found := choice.of(dot)) is not None:
                plans.append(found)
        except _Refused as reason:
            add_remark(module, dot, f"dot not by wgmma: {reason}")
    for plan in plans:
        if not plan.marked:
            add_remark(module, plan.dot, "dot turned: only its left operand can be in registers")
        dot = _swapped(plan.dot) if plan.swaps else plan.dot
        if plan.marked:
            _mark(dot, plan.adjacent)
    if any(plan.swaps for plan in plans):
        pass_through_dead_arguments(entry)
        upstream(module, options)


def _may_turn(dot: ir.Operation) -> bool:
    return is_oriented_kind(dot) or loop_load(dot.operands[1], dot) is None


def _mark(dot: ir.Operation, adjacent: bool) -> None:
    dot.attributes[ORIENTED] = ir.UnitAttr.get()
    if adjacent:
        dot.attributes[ADJACENT_ROWS] = ir.UnitAttr.get()


class _Choice:
    """What is known about the loads of a kernel; tma: whether that may copy."""

    def __init__(self, facts: AxisFacts, analysis: AffineAnalysis, warps: int, tma: bool) -> None:
        self._facts, self._analysis, self._warps, self._tma = facts, analysis, warps, tma

    def of(self, dot: ir.Operation) -> _Plan | None:
        """None for a dot that is right as it is. Raises _Refused."""
        return self._along_depth(dot) if is_oriented_kind(dot) else self._out_of_registers(dot)

    def _along_depth(self, dot: ir.Operation) -> _Plan | None:
        """None where no form of the dot suits warpgroups."""
        a, b = (loop_load(value, dot) for value in list(dot.operands)[:2])
        if b is None or not is_pipelined(dot):
            return None
        rows, columns = dot.results[0].type.shape
        a_deep = a is not None and self._is_deep(a, dot.operands[0], 1)
        if self._is_deep(b, dot.operands[1], 0):
            if not tile_fits(rows, columns, self._warps):
                return None
            self._require_copy(b)
            return _Plan(dot, False, a is not None and not a_deep)
        if not tile_fits(columns, rows, self._warps):
            return None
        if a is None:
            raise _Refused("its left operand is computed, its right one not stored along the depth")
        if not a_deep:
            raise _Refused("neither operand is stored along the depth")
        self._require_copy(a)
        return _Plan(dot, True, True)

    def _out_of_registers(self, dot: ir.Operation) -> _Plan | None:
        """Of types that wgmma reads in any order: None unless only B is made in registers."""
        a, b, c = dot.operands
        load = loop_load(a, dot)
        if len(c.type.shape) != 2 or load is None or not self._is_copied(load):
            return None
        rows, columns = c.type.shape
        fits = rows >= LEAST_TURNED and tile_fits(
            columns, rows, self._warps, element_of(c.type).width
        )
        if not fits or not is_pipelined(dot) or _carried(dot) is None:
            return None
        return _Plan(dot, True, False, False) if _is_made_of_loads(b, dot.block) else None

    def _is_copied(self, load: ir.Operation) -> bool:
        """Whether enough bytes lie together for copies ahead of the loop's products."""
        element = element_of(load.results[0].type)
        return max(self._facts.access_limits(load)) * element.width // 8 >= WORD_BYTES

    def _is_deep(self, load: ir.Operation, operand: Value, k: int) -> bool:
        """Whether the operand that comes from `load` is stored along its dimension `k`."""
        turned = defining_op(operand) != load
        return self._order(load)[0] == (1 - k if turned else k)

    def _order(self, load: ir.Operation) -> tuple[int, int]:
        """The load's dimensions, fastest first."""
        size = element_of(load.results[0].type).width // 8
        limits = self._facts.access_limits(load)
        fastest = 0 if limits[0] > limits[1] else 1
        address = self._analysis.of(load.operands[0])
        if limits[fastest] * size < WORD_BYTES and address is not None and ONE in address.dims:
            fastest = address.dims.index(ONE)
        return fastest, 1 - fastest

    def _require_copy(self, load: ir.Operation) -> None:
        """That what wgmma is to read of tf32 comes rounded, by TMA. Raises _Refused."""
        element = element_of(load.results[0].type)
        if not isinstance(element, ir.F32Type):
            return
        if not self._tma:
            raise _Refused("threads would copy fp32 without rounding it")
        if not is_only_multiplied(load):
            raise _Refused("an operand has other uses, and would be rounded for them, too")
        try:
            plan_map(load, self._order(load), element.width // 8, self._analysis, self._facts)
        except NotAffine as reason:
            raise _Refused(f"threads would copy fp32 without rounding it: {reason}") from None


def _is_made_of_loads(value: Value, block: ir.Block) -> bool:
    """Whether a tile is made in `block` of what is loaded there, each element by itself."""
    pending, seen, found = [value], set(), False
    while pending:
        maker = defining_op(pending.pop())
        if maker is None or maker.block != block or maker in seen:
            continue
        seen.add(maker)
        if maker.name != "mt.load":
            if maker.name == "mt.dot" or len(maker.regions):
                return False
            pending += maker.operands
        found = found or maker.name == "mt.load"
    return found


def _swapped(dot: ir.Operation) -> ir.Operation:
    """`dot` replaced by the product of its transposed operands: that."""
    index = _carried(dot)
    builder = Builder(ir.InsertionPoint(dot), dot.location)
    if index is None:
        new = _product(dot, _transposed(dot.operands[ACCUMULATOR], builder), builder)
        dot.results[0].replace_all_uses_with(_transposed(new.results[0], builder))
        dot.erase()
        return new
    loop = dot.parent.operation
    before = Builder(ir.InsertionPoint(loop), loop.location)
    start = _transposed(loop.operands[3 + index], before)
    around, (argument,) = with_arguments(loop, [start])
    new = _product(dot, argument, builder)
    body = around.regions[0].blocks[0]
    terminator_of(body).operands[index] = body.arguments[1 + index]
    yield_also(around, [new.results[0]])
    dot.erase()
    give_results(loop, around)
    result = around.results[index]
    if any(True for _ in result.uses):
        following = Builder(ir.InsertionPoint(loop), loop.location)
        last = around.results[len(around.results) - 1]
        result.replace_all_uses_with(_transposed(last, following))
    loop.erase()
    return new


def _carried(dot: ir.Operation) -> int | None:
    """The iter arg of the loop around `dot` that only sums it up."""
    total, result = dot.operands[ACCUMULATOR], dot.results[0]
    body = dot.block
    if not isinstance(total, ir.BlockArgument) or total.owner != body:
        return None
    uses = [*total.uses, *result.uses]
    end = terminator_of(body)
    if len(uses) != 2 or uses[0].owner.operation != dot or uses[1].owner.operation != end:
        return None
    index = uses[1].operand_number
    return index if body.arguments[1 + index] == total else None


def _product(dot: ir.Operation, total: Value, builder: Builder) -> ir.Operation:
    a, b, _ = dot.operands
    attributes = attributes_of(dot)
    sides = [attributes.pop(f"mt.unsigned_{side}", None) for side in "ab"]
    for side, value in zip("ba", sides, strict=True):
        if value is not None:
            attributes[f"mt.unsigned_{side}"] = value
    operands = [_transposed(b, builder), _transposed(a, builder), total]
    return builder.create("mt.dot", [total.type], operands, attributes)


def _transposed(value: Value, builder: Builder) -> Value:
    """A tile with its two dimensions exchanged."""
    maker = defining_op(value)
    if maker is not None and maker.name == "mt.trans":
        return maker.operands[0]
    rows, columns = value.type.shape
    type_ = ir.RankedTensorType.get([columns, rows], value.type.element_type)
    constant = splat_constant(maker)
    if constant is not None:
        splat = ir.DenseElementsAttr.get_splat(type_, constant)
        return builder.op("arith.constant", type_, [], {"value": splat})
    return builder.op("mt.trans", type_, [value], {"order": ir.DenseI32ArrayAttr.get([1, 0])})
