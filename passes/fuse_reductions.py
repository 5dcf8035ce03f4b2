"""Merges reductions over tiles of one shape and axis into one op: one exchange between warps.

    before: %a = reduce(%x) {add}; %b = reduce(%y) {max}     after: %a, %b = reduce(%x, %y)

Requires: no layouts. Ensures: the same results. Only ops of one block are merged where neither
needs the other. Where the first result is needed before the second op, what that reduces is
computed before the first op.
"""

from __future__ import annotations

from minitriton.ir.builder import Builder
from minitriton.ir.dialect import MAX_VALUES, shape_of
from minitriton.ir.mlir import ir
from minitriton.ir.target import Target
from minitriton.passes.op_classes import is_elementwise
from minitriton.passes.tile_pass import PassOptions
from minitriton.passes.traversal import (
    blocks_of,
    int_attribute,
    kernel_of,
    ops_of,
    terminator_of,
)

MAX_DISTANCE = 32  # ops between two reductions that are still merged
_MOVABLE = frozenset(("mt.splat", "mt.expand_dims", "mt.broadcast", "arith.constant"))


def run(module: ir.Module, target: Target, options: PassOptions) -> None:
    """Merges in place."""
    _merge_block(kernel_of(module).regions[0].blocks[0])


def _merge_block(block: ir.Block) -> None:
    candidate: ir.Operation | None = None
    distance, used = 0, False
    for op in ops_of(block):
        if op.name.startswith("scf."):
            for inner in blocks_of(op):
                _merge_block(inner)
        distance += 1
        if op.name == "mt.reduce":
            place = None
            if candidate is not None and distance <= MAX_DISTANCE and _can_merge(candidate, op):
                place = _place(candidate, op, used)
            if candidate is not None and place is not None:
                candidate = _merge(candidate, op, place)
            else:
                candidate, used = op, False
            distance = 0
        elif candidate is not None and _uses(op, candidate):
            used = True


def _place(first: ir.Operation, second: ir.Operation, used: bool) -> ir.Operation | None:
    """That of the two reductions where both can be done; `used`: the result of `first` is, before
    `second`. What `second` reduces is moved up if need be."""
    if not used:
        return second
    between = []
    for op in reversed(ops_of(first.block)):
        if op == first:
            break
        between.append(op)
    needed, moved = {v.owner for v in second.operands}, []
    for op in between:  # the last one first
        if op in needed:
            if not (is_elementwise(op.name) or op.name in _MOVABLE):
                return None
            moved.append(op)
            needed |= {v.owner for v in op.operands}
    if first in needed:
        return None
    for op in reversed(moved):
        op.move_before(first)
    return first


def _uses(op: ir.Operation, maker: ir.Operation) -> bool:
    """Whether `op` or an op inside it uses a result of `maker`."""
    for result in maker.results:
        for use in result.uses:
            user = use.owner.operation
            while user is not None and user.block != op.block:
                user = user.parent.operation
            if user == op:
                return True
    return False


def _can_merge(first: ir.Operation, second: ir.Operation) -> bool:
    same = int_attribute(first, "axis") == int_attribute(second, "axis") and shape_of(
        first.operands[0].type
    ) == shape_of(second.operands[0].type)
    fits = len(first.operands) + len(second.operands) <= MAX_VALUES
    return same and fits and not _uses(second, first)


def _merge(first: ir.Operation, second: ir.Operation, place: ir.Operation) -> ir.Operation:
    """One op at `place` that does both folds side by side."""
    pair = (first, second)
    operands = [v for op in pair for v in op.operands]
    results = [r.type for op in pair for r in op.results]
    builder = Builder(ir.InsertionPoint(place), second.location)
    merged = builder.create("mt.reduce", results, operands, {"axis": first.attributes["axis"]}, 1)
    elements = [v.type.element_type for v in operands]
    body = ir.Block.create_at_start(
        merged.regions[0], elements + elements, [second.location] * (2 * len(elements))
    )
    inside = Builder(ir.InsertionPoint(body), second.location)
    yielded = []
    start = 0
    for op in pair:
        yielded += _inline(op, body, start, len(operands), inside)
        start += len(op.operands)
    inside.create("mt.yield", [], yielded)
    position = 0
    for op in pair:
        for result in op.results:
            result.replace_all_uses_with(merged.results[position])
            position += 1
    second.erase()
    first.erase()
    return merged


def _inline(
    op: ir.Operation, body: ir.Block, start: int, total: int, builder: Builder
) -> list[ir.Value]:
    """Copies the combine region of `op` to the end of `body`; returns what it yields."""
    source = op.regions[0].blocks[0]
    count = len(op.operands)
    for index, argument in enumerate(source.arguments):
        half, position = divmod(index, count)
        argument.replace_all_uses_with(body.arguments[half * total + start + position])
    yielded = list(terminator_of(source).operands)
    for inner in ops_of(source)[:-1]:
        moved = body.operations
        if len(moved):
            inner.move_after(moved[len(moved) - 1])
        else:
            body.append(inner)
    return yielded
