"""Shared-memory layouts of tiles: XOR swizzles that keep row and column accesses apart."""

from __future__ import annotations

from collections.abc import Sequence

from minitriton.ir.linear_layout import LinearLayout, hull, log2_exact

BANK_ROW_BYTES = 128
"""32 banks of 4 bytes: addresses that many bytes apart share a bank."""


def shared_swizzled(
    shape: Sequence[int], order: Sequence[int], vec: int, per_phase: int, max_phase: int
) -> LinearLayout:
    """Rows along order[0]; groups of `vec` elements of row r are XORed with
    (r // per_phase) % max_phase. max_phase 1 is the plain layout."""
    rank = len(shape)
    vectors = []
    for position, dim in enumerate(order):
        for bit in range(log2_exact(hull(shape[dim]))):
            vector = [0] * rank
            vector[dim] = 1 << bit
            if position == 1:
                phase = ((1 << bit) // per_phase) % max_phase
                vector[order[0]] = (vec * phase) % hull(shape[order[0]])
            vectors.append(tuple(vector))
    return LinearLayout.shared(shape, vectors)


def shared_plain(shape: Sequence[int]) -> LinearLayout:
    """C order."""
    return shared_swizzled(shape, range(len(shape))[::-1], 1, 1, 1)


def shared_for_mma_operand(
    shape: Sequence[int],
    order: Sequence[int],
    elem_bits: int,
    op_index: int | None = None,
) -> LinearLayout:
    """Swizzle for a dot operand: 16-byte row writes, ldmatrix and plain fragment loads are free
    of bank conflicts.

    op_index (0: [..., M, K], 1: [..., K, N]) matters only for elements that ldmatrix cannot
    transpose (not 16 bits wide) stored with K not fastest: their lanes read 4 K-rows at once.
    """
    rank = len(shape)
    inner_bytes = hull(shape[order[0]]) * elem_bits // 8
    vec = max(1, 128 // elem_bits)
    k_dim = None if op_index is None else (rank - 1 if op_index == 0 else rank - 2)
    if k_dim is not None and order[0] != k_dim and elem_bits != 16:
        return _for_strided_k(shape, order, elem_bits)
    if inner_bytes > BANK_ROW_BYTES and shape[order[0]] != hull(shape[order[0]]):
        return shared_tma(shape, order, elem_bits, BANK_ROW_BYTES)  # rows would be far apart
    per_phase = max(1, BANK_ROW_BYTES // inner_bytes)
    max_phase = max(1, 8 // per_phase)
    return shared_swizzled(shape, order, vec, per_phase, max_phase)


def _for_strided_k(shape: Sequence[int], order: Sequence[int], elem_bits: int) -> LinearLayout:
    """A fragment load reads 8 consecutive elements in each of 4 rows, 32/elem_bits rows apart."""
    inner_bytes = hull(shape[order[0]]) * elem_bits // 8
    segment = max(4, elem_bits)  # bytes of 8 elements
    vec = max(segment, 16) * 8 // elem_bits
    apart = 32 // elem_bits
    phases = min(4, max(1, inner_bytes * 8 // (vec * elem_bits)))
    per_phase = max(apart, BANK_ROW_BYTES // inner_bytes)
    return shared_swizzled(shape, order, vec, per_phase, phases)


def shared_tma(
    shape: Sequence[int],
    order: Sequence[int],
    elem_bits: int,
    swizzle_bytes: int | None = None,
) -> LinearLayout:
    """What a TMA copy with CU_TENSOR_MAP_SWIZZLE_{32,64,128}B writes and wgmma reads.

    Rows wider than the swizzle are cut into panels of `swizzle_bytes`, each one a box of the
    copy, stored one after the other; the last may go beyond the end of a row. swizzle_bytes 16
    means no swizzle (16-byte panels); the default is the widest that fits the row. The swizzle
    follows byte addresses, so the tile must start at a multiple of 8 * swizzle_bytes.
    """
    inner, *outer = order
    inner_bytes = shape[inner] * elem_bits // 8
    if swizzle_bytes is None:
        swizzle_bytes = max(16, min(BANK_ROW_BYTES, inner_bytes))
    if swizzle_bytes not in (16, 32, 64, 128) or inner_bytes < swizzle_bytes:
        raise ValueError(f"a row of {inner_bytes} bytes has no {swizzle_bytes}-byte swizzle")
    inner_bits = log2_exact(hull(shape[inner]))
    panel_bits = log2_exact(swizzle_bytes * 8 // elem_bits)
    steps = [(inner, bit) for bit in range(panel_bits)]
    steps += [(dim, bit) for dim in outer for bit in range(log2_exact(hull(shape[dim])))]
    steps += [(inner, bit) for bit in range(panel_bits, inner_bits)]
    # the hardware XORs address bits 7, 8, 9 into bits 4, 5, 6 (as many as the width has)
    chunk, line = log2_exact(128 // elem_bits), log2_exact(BANK_ROW_BYTES * 8 // elem_bits)
    vectors = []
    for position, (dim, bit) in enumerate(steps):
        vector = [0] * len(shape)
        vector[dim] = 1 << bit
        target = position - line + chunk
        if position >= line and target < panel_bits:
            vector[inner] ^= 1 << target
        vectors.append(tuple(vector))
    return LinearLayout.shared(shape, vectors)
