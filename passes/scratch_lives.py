"""How long scratch is taken where ops are to meet at few barriers.

    convert a (scratch 0); convert b (scratch 0); reduce (scratch 0)    five barriers
    convert a (scratch 0); convert b (scratch 1); reduce (scratch 2)    two

Scratch that is not written again before all warps have met in another op needs no barrier for that.
And of conversions one right after the other, all but the last are marked mt.meets_later: they leave
barrier and loads to the last, as both operands of a dot may.
"""

from __future__ import annotations

from collections.abc import Sequence

from minitriton.ir.conversion import SharedRoundTrip
from minitriton.ir.mlir import ir
from minitriton.passes.shared_usage import conversion_of, scratch_of
from minitriton.passes.traversal import ops_of


def meeting_later(owners: Sequence[ir.Operation]) -> list[ir.Operation]:
    """The conversions of which the next op, another one, may meet for both."""
    return [op for op in owners if _is_one_phase(op) and _may_leave(op, _next(op))]


def until_barriers(
    owners: Sequence[ir.Operation], lives: Sequence[tuple[int, int]], later: Sequence[ir.Operation]
) -> list[int]:
    """The last program point at which each owner's memory is taken: for scratch that of the next op
    at which all warps meet, after it was read.

    lives: first and last point of each owner's memory; later: marked mt.meets_later.
    """
    last = [end for _, end in lives]
    meetings: list[int] = []  # the next one is the last
    for i in reversed(range(len(owners))):
        scratch = scratch_of(owners[i])
        start, end = lives[i]
        if scratch is None or start < end:  # a buffer, or scratch that is never used again
            continue
        ahead = meetings[:-1] if owners[i] in later else meetings
        last[i] = max(end, ahead[-1] if ahead else meetings[-1] if meetings else end)
        if scratch.barrier and owners[i] not in later:
            meetings.append(start)
    return last


def _next(op: ir.Operation) -> ir.Operation | None:
    ops = ops_of(op.block)
    following = ops.index(op) + 1
    return ops[following] if following < len(ops) else None


def _is_one_phase(op: ir.Operation) -> bool:
    if op.name != "mt.convert_layout":
        return False
    plan = conversion_of(op)
    return isinstance(plan, SharedRoundTrip) and plan.one_phase and not plan.warp_local


def _may_leave(op: ir.Operation, following: ir.Operation | None) -> bool:
    """Whether what follows meets, and not on what `op` makes."""
    if following is None or not _is_one_phase(following):
        return False
    return following.operands[0] not in list(op.results)
