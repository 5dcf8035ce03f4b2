"""Which dimensions of a kernel's tiles are one and the same: what is done along one of them, to
elements or to sizes, is done along all of them.

    %p = addptr(splat %a, broadcast(expand_dims(range)))   range's dimension 0 is %p's dimension 0

Requires: no layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

from minitriton.ir.dialect import shape_of
from minitriton.ir.mlir import ir
from minitriton.passes.op_classes import MEMORY_ACCESS, is_tile, keeps_elements, tile_operands
from minitriton.passes.traversal import (
    Value,
    blocks_of,
    int_array,
    int_attribute,
    splat_constant,
    terminator_of,
    walk,
)

Dim = tuple[Value, int]  # a tile and the number of one of its dimensions


class TileDims:
    """The dimensions of all tiles of `function`, and which of them must stay in one piece."""

    def __init__(self, function: ir.Operation) -> None:
        self._parents: dict[Dim, Dim] = {}
        self._whole: list[tuple[Dim, ir.Operation, str]] = []
        for op in walk(function):
            self._relate(op)

    def of(self, dim: Dim) -> Dim:
        """The one that stands for all that are the same as `dim`."""
        parent = self._parents.get(dim, dim)
        if parent == dim:
            return dim
        found = self._parents[dim] = self.of(parent)
        return found

    def obstacle(self, dim: Dim) -> tuple[ir.Operation, str] | None:
        """An op that needs all elements along `dim` together, and what it does; None if none."""
        wanted = self.of(dim)
        for other, op, reason in self._whole:
            if self.of(other) == wanted:
                return op, reason
        return None

    # ties

    def tie(self, a: Dim, b: Dim) -> None:
        self._parents[self.of(a)] = self.of(b)

    def tie_all(self, values: Sequence[Value]) -> None:
        """Tiles of one shape, dimension by dimension."""
        tiles = [value for value in values if is_tile(value)]
        for other in tiles[1:]:
            for dim in range(len(other.type.shape)):
                self.tie((tiles[0], dim), (other, dim))

    def keep(self, op: ir.Operation, reason: str, *dims: Dim) -> None:
        """Says that `op` needs all elements along `dims`."""
        self._whole += [(dim, op, reason) for dim in dims]

    def _relate(self, op: ir.Operation) -> None:
        rule = _RULES.get(op.name)
        if rule is not None:
            rule(self, op)
        elif keeps_elements(op.name) or op.name in MEMORY_ACCESS:
            self.tie_all([*op.operands, *op.results])
        elif op.name not in ("scf.yield", "scf.condition"):  # of the op around them
            for tile in [*tile_operands(op), *filter(is_tile, op.results)]:
                self._keep_all(op, tile)

    def _keep_all(self, op: ir.Operation, tile: Value) -> None:
        reason = f"{op.name} takes all elements together"
        self.keep(op, reason, *((tile, dim) for dim in range(len(tile.type.shape))))

    # one rule per op

    def constant(self, op: ir.Operation) -> None:
        if is_tile(op.results[0]) and splat_constant(op) is None:
            self._keep_all(op, op.results[0])

    def free(self, op: ir.Operation) -> None:
        """Whatever the tile's size, its elements are made one by one."""

    def expand_dims(self, op: ir.Operation) -> None:
        (source,), (result,), axis = op.operands, op.results, int_attribute(op, "axis")
        for dim in range(len(source.type.shape)):
            self.tie((source, dim), (result, dim + (dim >= axis)))

    def broadcast(self, op: ir.Operation) -> None:
        (source,), (result,) = op.operands, op.results
        for dim, sizes in enumerate(zip(source.type.shape, result.type.shape, strict=True)):
            if sizes[0] == sizes[1]:
                self.tie((source, dim), (result, dim))

    def trans(self, op: ir.Operation) -> None:
        for dim, source in enumerate(int_array(op, "order")):
            self.tie((op.operands[0], source), (op.results[0], dim))

    def reshape(self, op: ir.Operation) -> None:
        """Outer and inner dimensions that keep their sizes keep their elements."""
        (source,), (result,) = op.operands, op.results
        before, after = list(source.type.shape), list(result.type.shape)
        outer = _equal(before, after)
        inner = _equal(before[outer:][::-1], after[outer:][::-1])
        for dim in range(outer):
            self.tie((source, dim), (result, dim))
        for dim in range(1, inner + 1):
            self.tie((source, len(before) - dim), (result, len(after) - dim))
        for tile, sizes in ((source, before), (result, after)):
            changed = range(outer, len(sizes) - inner)
            self.keep(op, "a reshape mixes them", *((tile, dim) for dim in changed))

    def join(self, op: ir.Operation) -> None:
        """Of a join or split: all dimensions but the one of size 2."""
        tiles = [*op.operands, *op.results]
        for dim in range(min(len(tile.type.shape) for tile in tiles)):
            for other in tiles[1:]:
                self.tie((tiles[0], dim), (other, dim))

    def along_axis(self, op: ir.Operation) -> None:
        """Of a scan, a concatenation or a flip."""
        tiles, axis = [*op.operands, *op.results], int_attribute(op, "axis")
        self.tie_all(tiles)
        self.keep(op, f"{op.name.removeprefix('mt.')} along them", (tiles[0], axis))

    def reduce(self, op: ir.Operation) -> None:
        axis = int_attribute(op, "axis")
        self.tie_all(op.operands)
        self.tie_all(op.results)
        self.keep(op, "a reduction along them", (op.operands[0], axis))
        for dim in range(len(shape_of(op.results[0].type) or ())):
            self.tie((op.operands[0], dim + (dim >= axis)), (op.results[0], dim))

    def dot(self, op: ir.Operation) -> None:
        a, b, c = op.operands
        last = len(c.type.shape) - 1
        self.tie_all([c, op.results[0]])
        for batch in range(last - 1):
            self.tie((a, batch), (c, batch))
            self.tie((b, batch), (c, batch))
        self.tie((a, last - 1), (c, last - 1))
        self.tie((b, last), (c, last))
        self.keep(op, "a product sums along them", (a, last), (b, last - 1))
        self.keep(op, "they are also the columns of a product", (c, last))

    def loop(self, op: ir.Operation) -> None:
        body = op.regions[0].blocks[0]
        carried = zip(
            list(op.operands)[3:], list(body.arguments)[1:], terminator_of(body).operands,
            op.results, strict=True,
        )  # fmt: skip
        for values in carried:
            self.tie_all(values)

    def branch(self, op: ir.Operation) -> None:
        for block in blocks_of(op):
            for values in zip(terminator_of(block).operands, op.results, strict=True):
                self.tie_all(values)

    def while_loop(self, op: ir.Operation) -> None:
        before, after = blocks_of(op)
        updates = terminator_of(after).operands
        for values in zip(op.operands, before.arguments, updates, strict=True):
            self.tie_all(values)
        passed = list(terminator_of(before).operands)[1:]
        for values in zip(passed, after.arguments, op.results, strict=True):
            self.tie_all(values)


def _equal(a: Sequence[int], b: Sequence[int]) -> int:
    """With how many equal sizes both begin."""
    pairs = zip(a, b, strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


_RULES: dict[str, Callable[[TileDims, ir.Operation], None]] = {
    "arith.constant": TileDims.constant,
    "mt.make_range": TileDims.free,
    "mt.splat": TileDims.free,
    "mt.expand_dims": TileDims.expand_dims,
    "mt.broadcast": TileDims.broadcast,
    "mt.trans": TileDims.trans,
    "mt.reshape": TileDims.reshape,
    "mt.join": TileDims.join,
    "mt.split": TileDims.join,
    "mt.cat": TileDims.along_axis,
    "mt.flip_blocks": TileDims.along_axis,
    "mt.scan": TileDims.along_axis,
    "mt.reduce": TileDims.reduce,
    "mt.dot": TileDims.dot,
    "scf.for": TileDims.loop,
    "scf.if": TileDims.branch,
    "scf.while": TileDims.while_loop,
}
