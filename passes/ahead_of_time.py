"""Which values of a loop body can be computed iterations ahead, and clones that do so.

A value qualifies if it is a pure function of the induction variable, loop invariants, carried
values whose own updates qualify, and scalars loaded at addresses that qualify (page numbers, say);
no loads of tiles, dots or reductions take part. A carried value that needs a load does not qualify.
"""

from __future__ import annotations

from collections.abc import Iterable

from minitriton.ir.builder import Builder
from minitriton.ir.mlir import ir
from minitriton.passes.op_classes import is_elementwise, is_tile
from minitriton.passes.traversal import Value, attributes_of, block_of, terminator_of

_CHEAP = frozenset(
    ("mt.make_range", "mt.splat", "mt.expand_dims", "mt.broadcast", "mt.reshape", "mt.trans",
     "arith.constant", "mt.program_id", "mt.num_programs")
)  # fmt: skip


class AheadOfTime:
    """Analysis of one scf.for; `carried` collects the iter args that qualified values need.
    loads: whether scalars may be loaded ahead, as the loop does not write where they stand."""

    def __init__(self, loop: ir.Operation, *, loads: bool) -> None:
        self.loads = loads
        self.body = loop.regions[0].blocks[0]
        self.induction, *self.arguments = self.body.arguments
        self.updates = list(terminator_of(self.body).operands)
        self.carried: list[int] = []
        self.runs: Value | None = None  # whether the iteration that clones are made for exists

    def qualifies(self, values: Iterable[Value]) -> bool:
        """Whether all of `values` can be computed ahead."""
        return all(self._check(value, [], self.loads) for value in values)

    def carry(self, values: Iterable[Value]) -> None:
        """Records the iter args that `values`, which qualify, need."""
        needed: list[int] = []
        for value in values:
            self._check(value, needed, self.loads)
        self.carried += [index for index in needed if index not in self.carried]

    def _check(self, value: Value, needed: list[int], loads: bool) -> bool:
        if block_of(value) != self.body or value == self.induction:
            return True
        if isinstance(value, ir.BlockArgument):
            index = value.arg_number - 1
            if index in needed:
                return True
            needed.append(index)
            return self._check(self.updates[index], needed, False)
        op = value.owner.operation
        if is_scalar_load(op):
            allowed = loads
        else:
            allowed = not len(op.regions) and (is_elementwise(op.name) or op.name in _CHEAP)
        return allowed and all(self._check(operand, needed, loads) for operand in op.operands)

    def is_invariant(self, value: Value) -> bool:
        """Whether a value that qualifies is the same in every iteration."""
        if block_of(value) != self.body:
            return True
        if isinstance(value, ir.BlockArgument) or is_scalar_load(value.owner.operation):
            return False
        return all(map(self.is_invariant, value.owner.operation.operands))

    def clone(self, value: Value, known: dict[Value, Value], builder: Builder) -> Value:
        """`value` rebuilt at the builder's place from the replacements in `known` (extended)."""
        found = known.get(value)
        if found is not None:
            return found
        if block_of(value) != self.body:
            return value
        op = value.owner.operation
        operands = [self.clone(operand, known, builder) for operand in op.operands]
        attributes = attributes_of(op)
        if op.name == "mt.load":  # past the last iteration its address may be anything
            assert self.runs is not None, "loads are cloned for copies only"
            mask = self.runs
            if len(operands) > 1:
                mask = builder.op("arith.andi", mask.type, [operands[1], mask])
            operands[1:2] = [mask]
            attributes.pop("operandSegmentSizes")
        made = builder.op(op.name, value.type, operands, attributes)
        known[value] = made
        return made


def is_scalar_load(op: ir.Operation) -> bool:
    """Whether `op` loads one number from global memory, and not a volatile one."""
    return op.name == "mt.load" and not is_tile(op.results[0]) and "volatile" not in op.attributes
