"""Loops over tiles that a kernel's source has: each iteration a product of its own, and a store.

    for %t = program_id to tiles, programs { for { dot }; store }

Two groups of warps may run such iterations side by side (`ping_pong`), if only their ends touch
memory that others write: ends run one after the other, in the order of the iterations.
"""

from __future__ import annotations

from minitriton.ir.mlir import ir
from minitriton.passes.global_order import may_overwrite
from minitriton.passes.op_classes import MEMORY_ACCESS, is_pure
from minitriton.passes.traversal import ops_of, walk

_HARMLESS = frozenset(("scf.for", "scf.if", "scf.yield", "func.return", "mt.assume"))


def around(loop: ir.Operation) -> ir.Operation | None:
    """The loop that `loop` lies in the body of, not inside a branch."""
    parent = loop.parent.operation
    return parent if parent.name == "scf.for" else None


def refusal(function: ir.Operation, tiles: ir.Operation, loop: ir.Operation) -> str | None:
    """Why iterations of `tiles` cannot run side by side up to the end of `loop`, which multiplies;
    None if they can."""
    if len(tiles.results):
        return "a tile needs what the one before it left"
    body, loads = tiles.regions[0].blocks[0], []
    ends = {
        inner for op in ops_of(body) if loop.is_before_in_block(op) for inner in (op, *walk(op))
    }
    for op in walk(function):
        if op in ends:
            continue
        if op.name == "mt.load":
            loads.append(op)
        elif not (is_pure(op.name) or op.name in _HARMLESS):
            return f"it has {op.name} elsewhere than after the products of a tile"
    if may_overwrite(tiles, loads, function.regions[0].blocks[0]):
        return "a tile may read what one before it writes"
    return None


def first_access(body: ir.Block, loop: ir.Operation) -> ir.Operation | None:
    """The first op of `body` after `loop` with an access to global memory, itself or inside."""
    for op in ops_of(body):
        if loop.is_before_in_block(op) and any(
            inner.name in MEMORY_ACCESS for inner in (op, *walk(op))
        ):
            return op
    return None
