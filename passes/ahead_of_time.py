"""Which values of a loop body can be computed iterations ahead, and clones that do so.

A value qualifies if it is a pure function of the induction variable, loop invariants and carried
values whose own updates qualify; no loads, dots or reductions take part.
"""

from __future__ import annotations

from collections.abc import Iterable

from minitriton.ir.builder import Builder
from minitriton.ir.mlir import ir
from minitriton.passes.op_classes import is_elementwise
from minitriton.passes.traversal import Value, attributes_of, block_of, terminator_of

_CHEAP = frozenset(
    ("mt.make_range", "mt.splat", "mt.expand_dims", "mt.broadcast", "mt.reshape", "mt.trans",
     "arith.constant", "mt.program_id", "mt.num_programs")
)  # fmt: skip


class AheadOfTime:
    """Analysis of one scf.for; `carried` collects the iter args that qualified values need."""

    def __init__(self, loop: ir.Operation) -> None:
        self.body = loop.regions[0].blocks[0]
        self.induction, *self.arguments = self.body.arguments
        self.updates = list(terminator_of(self.body).operands)
        self.carried: list[int] = []

    def qualifies(self, values: Iterable[Value]) -> bool:
        """Whether all of `values` can be computed ahead; if so their iter args are recorded."""
        needed: list[int] = []
        for value in values:
            if not self._check(value, needed):
                return False
        self.carried += [index for index in needed if index not in self.carried]
        return True

    def _check(self, value: Value, needed: list[int]) -> bool:
        if block_of(value) != self.body or value == self.induction:
            return True
        if isinstance(value, ir.BlockArgument):
            index = value.arg_number - 1
            if index in needed:
                return True
            needed.append(index)
            return self._check(self.updates[index], needed)
        op = value.owner.operation
        if len(op.regions) or not (is_elementwise(op.name) or op.name in _CHEAP):
            return False
        return all(self._check(operand, needed) for operand in op.operands)

    def clone(self, value: Value, known: dict[Value, Value], builder: Builder) -> Value:
        """`value` rebuilt at the builder's place from the replacements in `known` (extended)."""
        found = known.get(value)
        if found is not None:
            return found
        if block_of(value) != self.body:
            return value
        op = value.owner.operation
        operands = [self.clone(operand, known, builder) for operand in op.operands]
        made = builder.op(op.name, value.type, operands, attributes_of(op))
        known[value] = made
        return made
