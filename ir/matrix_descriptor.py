"""wgmma's view of an operand tile in shared memory: the 64-bit matrix descriptor.

A tile that wgmma can read is cut into panels of `span` bytes along its fastest dimension, swizzled
by the same amount: exactly what `shared_tma` describes. Whether some layout is one of those is
decided by comparing the two, so a descriptor cannot disagree with the layout it stands for.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from minitriton.ir.linear_layout import LinearLayout, granule
from minitriton.ir.shared_layouts import shared_tma

ALIGNMENT = 1024
"""Buffers start at a multiple of the largest swizzle pattern: 8 rows of 128 bytes."""
STEP_BYTES = 32
"""Bytes of a row's or column's elements that one instruction takes."""
_SWIZZLE_CODES = {128: 1, 64: 2, 32: 3}
_UNIT = 16  # lengths in descriptors count 16 bytes


@dataclass(frozen=True)
class MatrixDescriptor:
    """An operand of `free` rows (M) or columns (N) and depth `depth`.

    k_major: K is the fastest dimension, as all but 16-bit elements must have it. span: swizzle and
    panel width in bytes. size: bytes of an element: 1, 2 or 4 (tf32).
    """

    free: int
    depth: int
    k_major: bool
    span: int
    size: int = 2

    @property
    def stride(self) -> int:
        """Bytes from one group of 8 rows (K-major) or 8 depths (MN-major) to the next."""
        return 8 * self.span

    @property
    def leading(self) -> int:
        """Bytes from one panel to the next; ignored by the hardware for K-major operands."""
        return _UNIT if self.k_major else self.depth * self.span

    @property
    def constant(self) -> int:
        """The descriptor without its start address."""
        code = _SWIZZLE_CODES[self.span]
        return code << 62 | (self.stride // _UNIT) << 32 | (self.leading // _UNIT) << 16

    def offset(self, free: int, depth: int) -> int:
        """Byte offset at which the sub-tile at (free, depth) starts: 8 rows, 32 bytes apart."""
        row, column = (free, depth) if self.k_major else (depth, free)
        panel, inner = divmod(column * self.size, self.span)
        rows = self.free if self.k_major else self.depth
        return (panel * rows + row) * self.span + inner


@functools.lru_cache(maxsize=256)
def matrix_descriptor(
    shared: LinearLayout, op_index: int, size: int = 2
) -> MatrixDescriptor | None:
    """The descriptor of A ([M, K], op_index 0) or B ([K, N], 1) with elements of `size` bytes; None
    if wgmma cannot read it."""
    if shared.rank != 2:
        return None
    k = 1 - op_index
    free, depth = shared.shape[1 - k], shared.shape[k]
    if depth * size < STEP_BYTES or free < 8:
        return None
    for k_major in (True, False) if size == 2 else (True,):
        order = (k, 1 - k) if k_major else (1 - k, k)
        span = operand_span(shared.shape, order, size)
        if span and shared == shared_tma(shared.shape, order, 8 * size, span):
            return MatrixDescriptor(free, depth, k_major, span, size)
    return None


def operand_span(shape: tuple[int, ...], order: tuple[int, ...], size: int = 2) -> int:
    """Bytes of the widest swizzle whose panels fill a row along order[0]; 0 where none do."""
    unit = granule(shape[order[0]]) * size
    return min(128, unit) if unit >= 32 else 0
