"""Ping-pong: what only the end of a program needs is computed after its products.

    before: %m = ...; turn_wait; for { wgmma }; turn_pass; tma_store %m
    after:  turn_wait; for { wgmma }; turn_pass; %m = ...; tma_store %m

Otherwise ptxas mixes it into the time between a group's turn and its first product, when nobody
multiplies; after the products it costs nothing, as the other group's run. What the producer needs,
too, is computed twice, and marked mt.producer where nobody else needs it.
Requires: what the producer runs is a function of its own. Ensures: the same values.
"""

from __future__ import annotations

from minitriton.ir.mlir import ir
from minitriton.ir.target import Target
from minitriton.ir.warp_roles import ENDS, GROUPS, PRODUCER, ROW_GROUPS
from minitriton.passes.op_classes import is_pure
from minitriton.passes.tile_pass import PassOptions
from minitriton.passes.traversal import (
    Value,
    around_in,
    attributes_of,
    defining_op,
    is_used,
    kernel_of,
    ops_of,
    walk,
)


def run(module: ir.Module, target: Target, options: PassOptions) -> None:
    """Moves or copies pure operations, in kernels with groups that take turns at programs."""
    attributes = module.operation.attributes
    if GROUPS not in attributes or ROW_GROUPS in attributes:
        return
    for op in list(walk(kernel_of(module))):
        if op.name == "mt.turn_pass" and not {"mt.group", ENDS} & attributes_of(op).keys():
            _sink(op)
    for op in reversed(list(walk(kernel_of(module)))):
        users = [use.owner.operation for use in op.results[0].uses] if _is_movable(op) else []
        if users and all(PRODUCER in user.attributes for user in users):
            op.attributes[PRODUCER] = ir.UnitAttr.get()


def _sink(turn_pass: ir.Operation) -> None:
    """Past a turn's end."""
    ops = ops_of(turn_pass.block)
    before = ops[: ops.index(turn_pass)]
    needed = _needed(before)
    for op in reversed([op for op in before if _is_movable(op) and op not in needed]):
        late, first = [], None
        for use in op.results[0].uses:
            around = around_in(op.block, use.owner.operation)
            if turn_pass.is_before_in_block(around):
                late.append((use.owner.operation, use.operand_number))
                first = around if first is None or around.is_before_in_block(first) else first
        if first is None:
            continue
        copy = op.clone(ir.InsertionPoint(first))
        for user, number in late:
            user.operands[number] = copy.results[0]
        if not is_used(op):
            op.erase()


def _is_movable(op: ir.Operation) -> bool:
    return is_pure(op.name) and not len(op.regions) and len(op.results) == 1


def _needed(ops: list[ir.Operation]) -> set[ir.Operation]:
    """Those of `ops` that the warps with tiles need before the last one is done."""
    needed: set[ir.Operation] = set()

    def add(value: Value) -> None:
        op = defining_op(value)
        if op is not None and op not in needed:
            needed.add(op)
            for operand in op.operands:
                add(operand)

    for root in ops:
        if _is_movable(root) or PRODUCER in root.attributes:
            continue
        for op in (root, *walk(root)):
            if PRODUCER not in op.attributes and not (op != root and _only_copied(op)):
                for operand in op.operands:
                    add(operand)
    return needed


def _only_copied(op: ir.Operation) -> bool:
    """Whether all that needs a value of a loop's body is what the producer runs."""
    if not _is_movable(op):
        return False
    users = [use.owner.operation for use in op.results[0].uses]
    return all(PRODUCER in user.attributes or _only_copied(user) for user in users)
