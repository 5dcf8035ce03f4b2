"""Finds loop-carried values that only feed themselves, so that upstream canonicalize drops them.

before: for iter_args(%p = %q) { %n = addptr %p, %c; yield %n }    after: ... { yield %p }
"""

from __future__ import annotations

from minitriton.ir.mlir import ir
from minitriton.passes.op_classes import is_pure
from minitriton.passes.traversal import Value, block_of, blocks_of, ops_of, terminator_of


def pass_through_dead_arguments(block: ir.Block) -> None:
    """Makes every scf.for below `block` yield its dead iter args unchanged."""
    for op in ops_of(block):
        for inner in blocks_of(op) if op.name.startswith("scf.") else ():
            pass_through_dead_arguments(inner)
        if op.name == "scf.for":
            _pass_through(op)


def _pass_through(loop: ir.Operation) -> None:
    body = loop.regions[0].blocks[0]
    arguments = list(body.arguments)[1:]
    end = terminator_of(body)
    live: set[Value] = set()
    pending = [
        end.operands[index]
        for index, result in enumerate(loop.results)
        if any(True for _ in result.uses)
    ]
    for op in ops_of(body):
        if op != end and not (is_pure(op.name) and not len(op.regions)):
            pending += _used_by(op)
    while pending:
        value = pending.pop()
        if value in live or block_of(value) != body:
            continue
        live.add(value)
        if isinstance(value, ir.BlockArgument):
            if value.arg_number:
                pending.append(end.operands[value.arg_number - 1])
        else:
            pending += list(value.owner.operation.operands)
    for index, argument in enumerate(arguments):
        if argument not in live and not any(True for _ in loop.results[index].uses):
            end.operands[index] = argument


def _used_by(op: ir.Operation) -> list[Value]:
    """Operands of `op` and of all ops inside it."""
    values = list(op.operands)
    for block in blocks_of(op):
        for inner in ops_of(block):
            values += _used_by(inner)
    return values
