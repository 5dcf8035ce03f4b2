"""Copies that one thread issues ahead of a loop, whatever happens: together behind one branch.

They follow each other, all under the predicate of the first thread, and ptxas (13.5) makes some of
them conditional on a vote of the warp, lets its lanes arrive there apart, and so executes a copy
twice: the mbarrier counts bytes that nobody expects, and the kernel hangs (seen on an H200). Copies
under a condition of their own, those of a loop or ahead of one that may not run, are not assembled
so (the tests look at every kernel's SASS), and stay predicated: with branches beside products in
flight ptxas may wait for these (C7511), or spill.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from minitriton.ir.mlir import ir

_ACTS = {"mt.mbarrier_expect": 1, "mt.tma_copy": 2}  # operand that says whether it runs


def acts(op: ir.Operation) -> bool:
    """Whether one thread executes this op in any case."""
    if op.name not in _ACTS:
        return False
    runs = op.operands[_ACTS[op.name]]
    if isinstance(runs, ir.BlockArgument):
        return False
    source = runs.owner.operation
    is_constant = source.name == "arith.constant"
    return is_constant and bool(ir.IntegerAttr(source.attributes["value"]).value)


def parts(ops: Sequence[ir.Operation]) -> Iterator[list[ir.Operation]]:
    """The ops in order: those of one thread together with what only computes scalars and places
    between them, every other op alone."""
    at = 0
    while at < len(ops):
        end = _end(ops, at) if acts(ops[at]) else at + 1
        yield list(ops[at:end])
        at = end


def _end(ops: Sequence[ir.Operation], first: int) -> int:
    """Behind the last op that goes with the one at `first`."""
    end = first + 1
    for place in range(first + 1, len(ops)):
        op = ops[place]
        if acts(op):
            end = place + 1
        elif not _only_places(op):
            break
    return end


def _only_places(op: ir.Operation) -> bool:
    if op.name == "mt.mem_index":
        return True
    scalar = not any(isinstance(result.type, ir.ShapedType) for result in op.results)
    return scalar and op.name.startswith("arith.")
