"""When two programs that run side by side copy the same tiles: what the other one's values are.

In a persistent kernel whose CTAs form clusters of two, program p of one CTA runs beside program
p ^ 1 of the other, and both run equally many iterations of every loop that copies. So coordinates
are equal in all iterations if all that differs from program to program in them is equal: such
values, `leaves`, are computed for both programs before the loop, and compared.
"""

from __future__ import annotations

from collections.abc import Sequence

from minitriton.ir.builder import Builder
from minitriton.ir.mlir import ir
from minitriton.ir.warp_roles import PRODUCER
from minitriton.passes.ahead_of_time import is_scalar_load
from minitriton.passes.multi_buffer import EQ, compare
from minitriton.passes.op_classes import is_pure, is_tile, may_trap, names_special_register
from minitriton.passes.traversal import (
    Value,
    around_in,
    attributes_of,
    block_of,
    defining_op,
    terminator_of,
)

_PLACES = frozenset(("mt.program_id", "mt.cta_id", "mt.group_id"))  # that differ between CTAs


class NotShared(Exception):
    """The programs cannot be proved to read the same; the message says why."""


class Neighbours:
    """Values of a program and of the one beside it; `programs` is the loop over them."""

    def __init__(self, programs: ir.Operation) -> None:
        self._programs = programs
        self._body = programs.regions[0].blocks[0]
        self._program = self._body.arguments[0]
        # by value and whether it is the neighbour's
        self._known: dict[tuple[Value, bool], Value] = {}
        self._equal: dict[Value, Value] = {}
        self._differing: dict[Value, bool] = {}
        self._rebuildable: dict[Value, bool] = {}

    def equal(self, values: Sequence[Value], user: ir.Operation) -> Value:
        """i1, for the producer alone: both programs have these `values`, which `user` reads, in all
        iterations of the loops around it. Made in front of these loops.

        Raises NotShared.
        """
        leaves: list[Value] = []
        seen: set[Value] = set()
        for value in values:
            self._collect(value, leaves, seen)
        place = around_in(self._body, user)
        builder = Builder(ir.InsertionPoint(place), user.location)
        i1 = ir.IntegerType.get_signless(1)
        found: Value | None = None
        for leaf in leaves:
            same = self._compared(leaf, builder)
            found = same if found is None else self._op("arith.andi", i1, [found, same], builder)
        return builder.constant(i1, 1) if found is None else found

    def _collect(self, value: Value, leaves: list[Value], seen: set[Value]) -> None:
        """The largest parts of `value` that are made once in a program and may differ."""
        if value in seen or not self._differs(value):
            return
        seen.add(value)
        if isinstance(value.type, ir.IntegerType) and self._is_rebuildable(value):
            leaves.append(value)
            return
        sources = _sources(value)
        if sources is None:
            owner = value.owner.owner if isinstance(value, ir.BlockArgument) else value.owner
            raise NotShared(f"where it is depends on {owner.operation.name}")
        for source in sources:
            self._collect(source, leaves, seen)

    def _differs(self, value: Value) -> bool:
        """Whether a value may depend on the program."""
        if value not in self._differing:
            self._differing[value] = self._depends(value)
        return self._differing[value]

    def _depends(self, value: Value) -> bool:
        seen, rest = {value}, [value]
        while rest:
            current = rest.pop()
            sources = None if current == self._program else _sources(current)
            if sources is None:
                return True
            new = [source for source in sources if source not in seen]
            seen.update(new)
            rest += new
        return False

    def _is_known_before(self, value: Value) -> bool:
        """Whether it is made outside of all loops and branches of a program."""
        return block_of(value).owner.operation.name == "func.func" or (
            block_of(value) == self._body
        )

    def _is_rebuildable(self, value: Value) -> bool:
        """Whether `value` can be computed in front of a program's loops, for either program."""
        if value not in self._rebuildable:
            self._rebuildable[value] = self._can_be_rebuilt(value)
        return self._rebuildable[value]

    def _can_be_rebuilt(self, value: Value) -> bool:
        if value == self._program or (self._is_known_before(value) and not self._differs(value)):
            return True
        op = defining_op(value)
        if op is None or len(op.regions) or len(op.results) != 1 or op.name in _PLACES:
            return False
        if any(map(is_tile, (*op.operands, *op.results))):
            return False
        here = self._is_known_before(value)
        allowed = is_pure(op.name) and (here or not may_trap(op))
        allowed = allowed and not names_special_register(op)
        # the neighbour loads from there, too
        allowed = allowed or (here and is_scalar_load(op))
        return allowed and all(map(self._is_rebuildable, op.operands))

    def _compared(self, leaf: Value, builder: Builder) -> Value:
        if leaf not in self._equal:
            both = [self._rebuilt(leaf, other, builder) for other in (False, True)]
            same = compare(EQ, both[0], both[1], builder)
            same.owner.attributes[PRODUCER] = ir.UnitAttr.get()
            self._equal[leaf] = same
        return self._equal[leaf]

    def _rebuilt(self, value: Value, other: bool, builder: Builder) -> Value:
        """`value` in front of the program's loops; other: the neighbour's."""
        if (value, other) in self._known:
            return self._known[value, other]
        if other and value == self._program:
            made = self._op("arith.xori", value.type, [value, _one(value, builder)], builder)
        elif self._is_known_before(value) and not (other and self._differs(value)):
            return value
        else:
            op = value.owner.operation
            operands = [self._rebuilt(operand, other, builder) for operand in op.operands]
            attributes = attributes_of(op)
            attributes.pop("operandSegmentSizes", None)
            made = self._op(op.name, value.type, operands, builder, attributes)
        self._known[value, other] = made
        return made

    def _op(
        self, name: str, type_: ir.Type, operands: Sequence[Value], builder: Builder,
        attributes: dict[str, ir.Attribute] | None = None,
    ) -> Value:  # fmt: skip
        """The result of an op that only the producer runs."""
        mark = {PRODUCER: ir.UnitAttr.get()}
        return builder.op(name, type_, operands, (attributes or {}) | mark)


def _one(value: Value, builder: Builder) -> Value:
    return builder.constant(value.type, 1)


def _sources(value: Value) -> list[Value] | None:
    """Values that decide `value`, in the same iteration or an earlier one; None: more than that."""
    if isinstance(value, ir.BlockArgument):
        loop = value.owner.owner.operation
        if loop.name == "func.func":
            return []
        if loop.name != "scf.for":
            return None
        if not value.arg_number:
            return [loop.operands[0], loop.operands[2]]
        number = value.arg_number - 1
        return [loop.operands[3 + number], _yielded(loop.regions[0], number)]
    op = value.owner.operation
    number = ir.OpResult(value).result_number
    match op.name:
        case "scf.for":
            ends = [op.operands[3 + number], _yielded(op.regions[0], number)]
            return [*list(op.operands)[:3], *ends]
        case "scf.if":
            return [op.operands[0], *(_yielded(region, number) for region in op.regions)]
    if (
        op.name in _PLACES
        or names_special_register(op)
        or not (is_pure(op.name) or is_scalar_load(op))
    ):
        return None
    return list(op.operands)


def _yielded(region: ir.Region, number: int) -> Value:
    """What the only block of a region ends with as its result `number`."""
    return terminator_of(region.blocks[0]).operands[number]
