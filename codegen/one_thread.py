"""Which ops one thread executes for all, and which of them go behind one branch.

Behind a branch, not under predicates: where predicated copies follow each other, ptxas (13.5) makes
one conditional on a vote of the warp and lets the lanes arrive there apart, so that it is executed
twice, and the mbarrier counts bytes that nobody expects (seen on an H200 as a kernel that hangs).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from minitriton.ir.mlir import ir

# operand that says whether it runs; None: it always does
_ACTS = {
    "mt.mbarrier_expect": 1, "mt.tma_copy": 2, "mt.tma_store": None, "mt.tma_store_wait": None,
}  # fmt: skip


def acts(op: ir.Operation) -> bool:
    """Whether one thread executes this op."""
    return op.name in _ACTS


def condition(op: ir.Operation) -> ir.Value | None:
    """The i1 on which an op that acts depends; None if it always runs."""
    place = _ACTS[op.name]
    if place is None:
        return None
    runs = op.operands[place]
    return None if _is_true(runs) else runs


def parts(ops: Sequence[ir.Operation]) -> Iterator[list[ir.Operation]]:
    """The ops in order: those of one thread under one condition together with what only computes
    scalars and places between them, every other op alone."""
    at = 0
    while at < len(ops):
        end = _end(ops, at) if acts(ops[at]) else at + 1
        yield list(ops[at:end])
        at = end


def _end(ops: Sequence[ir.Operation], first: int) -> int:
    """Behind the last op that goes with the one at `first`."""
    runs, end = condition(ops[first]), first + 1
    for place in range(first + 1, len(ops)):
        op = ops[place]
        if acts(op) and condition(op) == runs:
            end = place + 1
        elif not _only_places(op):
            break
    return end


def _only_places(op: ir.Operation) -> bool:
    if op.name == "mt.mem_index":
        return True
    scalar = not any(isinstance(result.type, ir.ShapedType) for result in op.results)
    return scalar and op.name.startswith("arith.")


def _is_true(value: ir.Value) -> bool:
    owner = value.owner
    if not isinstance(owner, ir.Operation | ir.OpView) or owner.operation.name != "arith.constant":
        return False
    return bool(ir.IntegerAttr(owner.operation.attributes["value"]).value)
