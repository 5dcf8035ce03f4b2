"""Operands of a loop's dots that were loaded before it, brought into the loop: there pipelining
copies them into shared memory once (`multi_buffer.is_fixed`), and wgmma reads them from there.

    before: %k = load %p; %a = convert_layout %k; for { dot %a, ... }
    after:  for { %k = load %p; %a = convert_layout %k; dot %a, ... }

Only where dots of whole warpgroups would otherwise have too few registers for their results beside
such operands. `put_back` undoes it for a loop that is not pipelined after all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from minitriton.ir.mlir import ir
from minitriton.passes.global_order import may_overwrite
from minitriton.passes.op_classes import LOOPS, MOVES, WRITES_IN_LOOP, is_tile
from minitriton.passes.shared_usage import element_bytes
from minitriton.passes.traversal import (
    Value,
    around_in,
    attributes_of,
    fills_with_zero,
    is_used,
    made_by,
    ops_of,
    walk,
)
from minitriton.passes.warpgroup_dots import fits, result_words

OTHER_REGISTERS = 72  # per thread, beside results and operands of the dots of a loop


@dataclass(frozen=True)
class _Use:
    """An operand of a dot, and the ops that make it, the load first."""

    dot: ir.Operation
    number: int
    chain: tuple[ir.Operation, ...]


@dataclass(frozen=True)
class Brought:
    """What was brought into a loop: copies of loads, and how the dots' operands were."""

    loads: frozenset[ir.Operation]
    before: tuple[tuple[ir.Operation, int, Value], ...]

    def put_back(self) -> None:
        """Makes the loop what it was."""
        for dot, number, value in self.before:
            chain = made_by(dot.operands[number])
            dot.operands[number] = value
            for op in reversed(chain):
                if not is_used(op):
                    op.erase()


def bring_in(loop: ir.Operation, entry: ir.Block, warps: int, registers: int) -> Brought | None:
    """Copies such loads to the beginning of the body; None where nothing qualifies.

    loop: a scf.for whose dots have layouts; entry: the kernel's body; warps: that hold tiles;
    registers: of one of their threads.
    """
    body = loop.regions[0].blocks[0]
    dots = [op for op in ops_of(body) if fits(op)]
    uses = [use for dot in dots for use in _uses(dot, loop)]
    uses = [use for use in uses if _may_move(use.chain[0], loop, entry)]
    if not uses:
        return None
    results = sum(map(result_words, dots))
    held = sum(_words(load) for load in dict.fromkeys(use.chain[0] for use in uses))
    if results + held <= (registers - OTHER_REGISTERS) * 32 * warps:
        return None
    before = []
    copies: dict[tuple[ir.Operation, ...], ir.Operation] = {}
    for use in uses:
        before.append((use.dot, use.number, use.dot.operands[use.number]))
        use.dot.operands[use.number] = _copied(use.chain, body, copies)
    return Brought(frozenset(copies[use.chain[:1]] for use in uses), tuple(before))


def _uses(dot: ir.Operation, loop: ir.Operation) -> list[_Use]:
    found = []
    for number in (0, 1):
        chain = made_by(dot.operands[number])
        if chain and chain[0].name == "mt.load" and not _is_inside(chain[0], loop):
            found.append(_Use(dot, number, tuple(chain)))
    return found


def _is_inside(op: ir.Operation, loop: ir.Operation) -> bool:
    while op.name != "func.func":
        op = op.parent.operation
        if op == loop:
            return True
    return False


def _may_move(load: ir.Operation, loop: ir.Operation, entry: ir.Block) -> bool:
    """Whether the load reads the same in the loop, and only such dots need its result."""
    if "volatile" in load.attributes or not fills_with_zero(load):
        return False
    if not is_tile(load.results[0]) or not _only_dots(load):
        return False
    around = around_in(load.block, loop)
    if around.name in LOOPS and may_overwrite(around, [load], entry):
        return False
    ops = ops_of(load.block)
    between = ops[ops.index(load) : ops.index(around)]
    if around.name not in LOOPS:
        between.append(around)
    return not any(op.name in WRITES_IN_LOOP for first in between for op in (first, *walk(first)))


def _only_dots(op: ir.Operation) -> bool:
    users = [use.owner.operation for use in op.results[0].uses]
    return all(fits(user) or (user.name in MOVES and _only_dots(user)) for user in users)


def _words(load: ir.Operation) -> int:
    """Registers that all threads together need to hold what is loaded."""
    type_ = load.results[0].type
    return prod(type_.shape) * element_bytes(type_) // 4


def _copied(
    chain: Sequence[ir.Operation], body: ir.Block,
    copies: dict[tuple[ir.Operation, ...], ir.Operation],
) -> Value:  # fmt: skip
    """The end of a copy of `chain` at the beginning of the body."""
    for count in range(1, len(chain) + 1):
        key = tuple(chain[:count])
        if key in copies:
            continue
        original = chain[count - 1]
        place = ops_of(body)[len(copies)]
        operands = list(original.operands)
        if count > 1:
            operands[0] = copies[key[:-1]].results[0]
        copies[key] = ir.Operation.create(
            original.name, [original.results[0].type], operands, attributes_of(original),
            loc=original.location, ip=ir.InsertionPoint(place),
        )  # fmt: skip
    return copies[tuple(chain)].results[0]
