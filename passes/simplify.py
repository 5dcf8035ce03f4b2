"""Cleans a tile function: upstream canonicalize and cse, then what they cannot do for tiles.

    before: addi(splat(%a), splat(%b))      after: splat(addi(%a, %b))
    before: select(%m, load(%p, %m), %o)    after: load(%p, %m, %o)

Requires: no layouts. Ensures: the same meaning; no dead or (within a block) repeated loads; pure
loop-invariant ops outside their loops unless the loop has mt.disable_licm; what counts the
iterations of a loop with others inside comes from its variable (`counters`).
"""

from __future__ import annotations

import functools

from minitriton.ir.mlir import ir, passmanager
from minitriton.ir.target import Target
from minitriton.passes.counters import replace_counters
from minitriton.passes.dead_arguments import pass_through_dead_arguments
from minitriton.passes.fold_tiles import fold_block
from minitriton.passes.op_classes import MAY_WRITE, is_pure, may_trap
from minitriton.passes.tile_pass import PassOptions
from minitriton.passes.traversal import (
    attributes_of,
    block_of,
    blocks_of,
    is_used,
    kernel_of,
    ops_of,
    walk,
)

UPSTREAM = "builtin.module(canonicalize,cse)"


def run(module: ir.Module, target: Target, options: PassOptions) -> None:
    """Simplifies the kernel of `module` in place."""
    upstream(module, options)
    replace_counters(module)
    body = kernel_of(module).regions[0].blocks[0]
    fold_block(body)
    hoist_invariants(body)
    share_loads(body)
    pass_through_dead_arguments(body)
    upstream(module, options)


def drop_leftovers(module: ir.Module, options: PassOptions) -> None:
    """After loads became copies: what only their addresses were for. Like `upstream`."""
    pass_through_dead_arguments(kernel_of(module).regions[0].blocks[0])
    upstream(module, options)
    share_loads(kernel_of(module).regions[0].blocks[0])


def upstream(module: ir.Module, options: PassOptions) -> None:
    """MLIR's own canonicalize and cse. Ops held in Python are invalid afterwards."""
    _manager(options.check).run(module.operation)


@functools.cache
def _manager(check: bool) -> passmanager.PassManager:
    """Kept, as collecting all patterns of canonicalize takes longer than applying them."""
    manager = passmanager.PassManager.parse(UPSTREAM)
    manager.enable_verifier(check)
    return manager


def hoist_invariants(block: ir.Block) -> None:
    """Moves pure ops whose operands come from outside a loop in front of it, inner loops first."""
    for op in ops_of(block):
        for inner in blocks_of(op) if op.name.startswith("scf.") else ():
            hoist_invariants(inner)
        if op.name == "scf.for" and "mt.disable_licm" not in op.attributes:
            body = op.regions[0].blocks[0]
            for candidate in ops_of(body):
                if _is_invariant(candidate, body):
                    candidate.move_before(op)


def _is_invariant(op: ir.Operation, body: ir.Block) -> bool:
    if not is_pure(op.name) or may_trap(op):
        return False
    inside = [value for inner in walk(op) for value in inner.operands] if len(op.regions) else []
    return not any(block_of(value) == body for value in (*op.operands, *inside))


def share_loads(block: ir.Block) -> None:
    """Drops unused loads, and repeats of a load with no write to memory between the two."""
    known: dict[tuple[object, ...], ir.Operation] = {}
    for op in ops_of(block):
        name = op.name
        if name == "mt.load" and "volatile" not in op.attributes:
            if not is_used(op):
                op.erase()
                continue
            key = (*op.operands, *sorted(attributes_of(op).items(), key=lambda item: item[0]))
            first = known.setdefault(key, op)
            if first is not op:
                op.results[0].replace_all_uses_with(first.results[0])
                op.erase()
        elif name in MAY_WRITE:
            inner = blocks_of(op)
            for nested in inner:
                share_loads(nested)
            if not inner or any(deep.name in MAY_WRITE for deep in walk(op)):
                known.clear()
