"""Layouts for memory accesses: threads along the contiguous dimension, as wide as is proved."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from minitriton.ir import layouts
from minitriton.ir.axis_analysis import AxisFacts
from minitriton.ir.dialect import PtrType, element_of
from minitriton.ir.linear_layout import LinearLayout
from minitriton.ir.mlir import ir
from minitriton.ir.types import bit_width

MAX_VECTOR_BYTES = 16
MAX_THREAD_BYTES = 32  # contiguous bytes per thread where accesses of several widths share a layout
SECTOR_BYTES = 32
GOOD_VECTOR_BYTES = 8


def access_bytes(op: ir.Operation) -> int:
    """Bytes of one element that a memory op moves."""
    return max(1, bit_width(PtrType(element_of(op.operands[0].type)).pointee) // 8)


class AccessLayouts:
    """The coalesced layout of every memory op on tiles; ops of one shape and order agree on one."""

    def __init__(self, accesses: Iterable[ir.Operation], facts: AxisFacts, num_warps: int) -> None:
        self.num_warps = num_warps
        self._facts = facts
        self._order: dict[ir.Operation, tuple[int, ...]] = {}
        self._vector: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        self._by_shape: dict[tuple[int, ...], tuple[int, ...]] = {}
        widest: dict[tuple[int, ...], int] = {}
        for op in accesses:
            shape = tuple(op.operands[0].type.shape)
            info = facts.of(op.operands[0])
            order = tuple(sorted(range(len(shape)), key=lambda d: (-info.contiguity[d], -d)))
            vector = self.vector_limit(op, order[0])
            size = widest[shape] = max(widest.get(shape, 1), access_bytes(op))
            self._order[op] = order
            best = max(vector, self._vector.get((shape, order), 1))
            self._vector[shape, order] = max(1, min(best, MAX_THREAD_BYTES // size))
            known = self._by_shape.get(shape)
            if known is None or vector > self._vector[shape, known]:
                self._by_shape[shape] = order

    def vector_limit(self, op: ir.Operation, dim: int) -> int:
        """Elements along `dim` that one instruction of at most 16 bytes may access."""
        limit = self._facts.access_limits(op)[dim]
        return max(1, min(limit, MAX_VECTOR_BYTES // access_bytes(op)))

    def of(self, op: ir.Operation) -> LinearLayout:
        """The coalesced layout for `op`."""
        shape, order = tuple(op.operands[0].type.shape), self._order[op]
        return layouts.default_blocked(shape, self.num_warps, order, self._vector[shape, order])

    def default(self, shape: tuple[int, ...]) -> LinearLayout:
        """A layout for tiles that no access or dot constrains."""
        order = self._by_shape.get(shape)
        vector = self._vector[shape, order] if order else 1
        return layouts.default_blocked(shape, self.num_warps, order, vector)

    def suits(self, op: ir.Operation, layout: LinearLayout) -> bool:
        """Whether accessing memory straight from `layout` is about as good as the coalesced one.

        Full sectors and vectors of 8 bytes (or what the coalesced layout reaches) are good enough;
        tiles with at most one element per thread always are.
        """
        if prod(layout.shape) <= 32 * self.num_warps:
            return True
        best = self.of(op)
        dim = self._order[op][0]
        vector, segment = self._quality(op, layout, dim)
        best_vector, best_segment = self._quality(op, best, dim)
        return vector >= min(GOOD_VECTOR_BYTES, best_vector) and segment >= min(
            SECTOR_BYTES, best_segment
        )

    def _quality(self, op: ir.Operation, layout: LinearLayout, dim: int) -> tuple[int, int]:
        """(bytes per instruction of a thread, contiguous bytes per warp)."""
        size = access_bytes(op)
        vector = layout.contiguous_registers(dim, self.vector_limit(op, dim)).width
        held = set(layout.flat("register")) | set(layout.flat("lane"))
        run, unit = 1, 1 << layout.dim_shifts[dim]
        while run < layout.shape[dim] and unit in held:
            run, unit = run * 2, unit * 2
        return vector * size, run * size
