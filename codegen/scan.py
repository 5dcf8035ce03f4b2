"""mt.scan: along a thread's registers, then lanes, warps, blocks; what ir/reduction.py plans."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

from minitriton.codegen.combine import (
    Combine,
    Operands,
    combine_of,
    exchange,
    shuffle_operands,
)
from minitriton.codegen.lower import Lowering, integer_attribute
from minitriton.codegen.shared_address import storage_bytes
from minitriton.codegen.warp_ops import lane_bit
from minitriton.ir.mlir import ir
from minitriton.ir.reduction import LaneStep, ScanPlan, plan_scan


def lower_scan(lowering: Lowering, op: ir.Operation) -> None:
    tiles = [lowering.tile(value) for value in op.operands]
    sizes = tuple(storage_bytes(tile.element) for tile in tiles)
    reverse = ir.BoolAttr(op.attributes["reverse"]).value
    plan = plan_scan(tiles[0].layout, integer_attribute(op, "axis"), sizes, reverse)
    combine = combine_of(lowering, op)
    registers = [[t.registers[r] for t in tiles] for r in range(len(tiles[0]))]
    for line in plan.lines:
        for before, register in itertools.pairwise(line):
            registers[register] = combine(registers[before], registers[register])
    totals = [registers[line[-1]] for line in plan.lines]
    prefixes = _prefixes(lowering, op, plan, combine, totals)
    if prefixes is not None:
        known = _has_prefix(lowering, plan)
        for index, (line, prefix) in enumerate(zip(plan.lines, prefixes, strict=True)):
            for register in line:
                own = registers[register]
                both = combine(prefix, own)
                carried = index in plan.carried
                registers[register] = both if carried else _choose(lowering, known, both, own)
    for register, original in plan.duplicates:
        registers[register] = registers[original]
    for index, result in enumerate(op.results):
        lowering.set_registers(result, [values[index] for values in registers])


def _choose(
    lowering: Lowering, condition: ir.Value, then: Operands, otherwise: Operands
) -> Operands:
    return [lowering.select(condition, a, b) for a, b in zip(then, otherwise, strict=True)]


def _prefixes(
    lowering: Lowering, op: ir.Operation, plan: ScanPlan, combine: Combine, totals: list[Operands]
) -> list[Operands] | None:
    """Per line, all that lies before this thread (anything where nothing does)."""
    prefixes: list[Operands] | None = None
    for index, step in enumerate(plan.lane_steps):
        fetched = [shuffle_operands(lowering, total, step.mask) for total in totals]
        behind = _is_behind(lowering, step, plan.reverse)
        prefixes = _extend(lowering, plan, step, combine, prefixes, fetched)
        if index + 1 < len(plan.lane_steps) or plan.cross_warp is not None or plan.chains:
            front = [_choose(lowering, behind, f, t) for f, t in zip(fetched, totals, strict=True)]
            back = [_choose(lowering, behind, t, f) for f, t in zip(fetched, totals, strict=True)]
            totals = [combine(a, b) for a, b in zip(front, back, strict=True)]
    if plan.cross_warp is not None:
        lines = exchange(lowering, plan.cross_warp, lowering.scratch(op), totals)
        prefixes, totals = _across_warps(lowering, plan, combine, prefixes, lines)
    if plan.chains:
        assert prefixes is not None
        _carry(lowering, plan, combine, prefixes, totals)
    return prefixes


def _carry(
    lowering: Lowering,
    plan: ScanPlan,
    combine: Combine,
    prefixes: list[Operands],
    totals: list[Operands],
) -> None:
    """Puts the totals of the blocks before a line's in front of its prefix."""
    known = _has_prefix(lowering, plan)
    for chain in plan.chains:
        carry = totals[chain[0]]
        for before, line in itertools.pairwise(chain):
            if before != chain[0]:
                carry = combine(carry, totals[before])
            prefixes[line] = _choose(lowering, known, combine(carry, prefixes[line]), carry)


def _extend(
    lowering: Lowering,
    plan: ScanPlan,
    step: LaneStep,
    combine: Combine,
    prefixes: list[Operands] | None,
    fetched: list[Operands],
) -> list[Operands]:
    """The prefixes after one butterfly step; before the first one no lane has any."""
    if prefixes is None:
        return fetched
    behind = _is_behind(lowering, step, plan.reverse)
    known = _lanes_before(lowering, step.earlier, plan.reverse)
    result = []
    for prefix, total in zip(prefixes, fetched, strict=True):
        joined = _choose(lowering, known, combine(total, prefix), total)
        result.append(_choose(lowering, behind, joined, prefix))
    return result


def _across_warps(
    lowering: Lowering,
    plan: ScanPlan,
    combine: Combine,
    prefixes: list[Operands] | None,
    lines: Iterator[list[Operands]],
) -> tuple[list[Operands], list[Operands]]:
    """Puts the totals of the warps before this one in front of the prefixes, nearest first; and
    the totals over all warps, which chains need. Line by line: many would not fit in registers."""
    assert plan.cross_warp is not None
    place, count = _warp_place(lowering, plan), plan.cross_warp.count
    order = range(1, count) if plan.reverse else range(count - 2, -1, -1)
    lanes = sum(step.mask for step in plan.lane_steps)
    has = _lanes_before(lowering, lanes, plan.reverse) if lanes else None
    steps = []
    for warp in order:
        applies = lowering.compare("ult" if plan.reverse else "ugt", place, warp)
        steps.append((warp, applies, has))
        has = applies if has is None else lowering.or_(has, applies)
    extended, totals = [], []
    for index, line in enumerate(lines):
        prefix = prefixes[index] if prefixes is not None else None
        for warp, applies, known in steps:
            if prefix is None:
                prefix = line[warp]
                continue
            both = combine(line[warp], prefix)
            value = both if known is None else _choose(lowering, known, both, line[warp])
            prefix = _choose(lowering, applies, value, prefix)
        assert prefix is not None
        extended.append(prefix)
        if plan.chains:
            totals.append(functools.reduce(combine, line[:: -1 if plan.reverse else 1]))
    return extended, totals


def _is_behind(lowering: Lowering, step: LaneStep, reverse: bool) -> ir.Value:
    """i1: this lane comes after its partner in scan order."""
    bit = lane_bit(lowering, step.mask.bit_length() - 1)
    if not reverse:
        return bit
    return lowering.once(("not lane bit", step.mask), lambda: lowering.xor(bit, 1))


def _lanes_before(lowering: Lowering, lanes: int, reverse: bool) -> ir.Value:
    """i1: among the lanes that differ in the bits `lanes`, some come before this one."""
    first = lanes if reverse else 0
    return lowering.once(
        ("lanes before", lanes, reverse),
        lambda: lowering.compare("ne", lowering.and_(lowering.lane_id, lanes), first),
    )


def _warp_place(lowering: Lowering, plan: ScanPlan) -> ir.Value:
    """i32: the position of this warp along the axis."""
    assert plan.cross_warp is not None
    bases = plan.cross_warp.position_bases
    return lowering.once(
        ("warp place", bases), lambda: lowering.linear(((lowering.warp_id, bases),))
    )


def _has_prefix(lowering: Lowering, plan: ScanPlan) -> ir.Value:
    """i1: some thread comes before this one."""
    lanes = sum(step.mask for step in plan.lane_steps)
    checks = [_lanes_before(lowering, lanes, plan.reverse)] if lanes else []
    if plan.cross_warp is not None:
        last = plan.cross_warp.count - 1 if plan.reverse else 0
        checks.append(lowering.compare("ne", _warp_place(lowering, plan), last))
    return checks[0] if len(checks) == 1 else lowering.or_(*checks)


RULES = {"mt.scan": lower_scan}
