"""Which elements of a loaded tile nobody ever sees.

Rows past the end of a matrix are often loaded all the same (`offsets % M`), multiplied, and in the
end not stored. Then it does not matter what the load gives for them.
"""

from __future__ import annotations

from minitriton.ir.mlir import ir
from minitriton.passes.affine import AffineAnalysis, Polynomial, bounds_of
from minitriton.passes.op_classes import is_elementwise
from minitriton.passes.traversal import Value, int_array, int_attribute, terminator_of

_KEEPS_DIMS = frozenset(("mt.convert_layout", "mt.broadcast"))


def unobserved(value: Value, dim: int, bound: Polynomial, analysis: AffineAnalysis) -> bool:
    """Whether every effect of `value` is independent of its elements at index >= bound of dim."""
    return _Search(bound, analysis).hidden(value, dim)


class _Search:
    """Follows a tile to its stores."""

    def __init__(self, bound: Polynomial, analysis: AffineAnalysis) -> None:
        self._bound, self._analysis = bound, analysis
        self._seen: set[tuple[Value, int]] = set()

    def hidden(self, value: Value, dim: int) -> bool:
        """Whether no element past the bound of `dim` has an effect."""
        if (value, dim) in self._seen:
            return True
        self._seen.add((value, dim))
        return all(self._use(use.owner.operation, use.operand_number, dim) for use in value.uses)

    def _use(self, op: ir.Operation, position: int, dim: int) -> bool:
        if op.name == "mt.store":
            return position == 1 and self._masked(op, dim)
        if op.name == "scf.yield":
            return self._yielded(op, position, dim)
        if op.name == "scf.for":  # an initial value
            body = op.regions[0].blocks[0]
            index = position - 3
            return index >= 0 and self._both(body.arguments[1 + index], op.results[index], dim)
        found = self._result_dim(op, position, dim)
        return found is not None and self.hidden(op.results[0], found)

    def _both(self, a: Value, b: Value, dim: int) -> bool:
        return self.hidden(a, dim) and self.hidden(b, dim)

    def _masked(self, store: ir.Operation, dim: int) -> bool:
        if len(store.operands) < 3:
            return False
        bounds = bounds_of(store.operands[2], self._analysis)
        return bounds is not None and (dim, self._bound, True) in bounds

    def _yielded(self, op: ir.Operation, position: int, dim: int) -> bool:
        parent = op.parent.operation
        if parent.name == "scf.for":
            body = parent.regions[0].blocks[0]
            return terminator_of(body) == op and self._both(
                body.arguments[1 + position], parent.results[position], dim
            )
        return parent.name == "scf.if" and self.hidden(parent.results[position], dim)

    @staticmethod
    def _result_dim(op: ir.Operation, position: int, dim: int) -> int | None:
        """Where dimension `dim` of an operand is in the only result; None if it mixes in."""
        if op.name in _KEEPS_DIMS or is_elementwise(op.name):
            return dim
        if op.name == "mt.trans":
            return int_array(op, "order").index(dim)
        if op.name == "mt.expand_dims":
            return dim + (dim >= int_attribute(op, "axis"))
        if op.name == "mt.dot":
            rank = len(op.results[0].type.shape)
            inner = {0: rank - 1, 1: rank - 2}.get(position)
            return None if dim == inner else dim
        if op.name == "mt.reduce" and len(op.results) == 1:
            axis = int_attribute(op, "axis")
            return None if dim == axis else dim - (dim > axis)
        return None
