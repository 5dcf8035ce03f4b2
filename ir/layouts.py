"""Constructors of distributed layouts: blocked tiles and tensor-core fragments.

Warps are numbered with the second-to-last dimension fastest in tensor-core layouts (so four
consecutive warps of a (4, n) arrangement are a warpgroup of wgmma), and by `order` in blocked
ones. Shared-memory layouts and access plans live in shared_layouts, shared_access and ldmatrix
and can be imported from here too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from minitriton.ir.ldmatrix import LdmatrixPlan, ldmatrix_plan
from minitriton.ir.linear_layout import LinearLayout, granule, hull, log2_exact
from minitriton.ir.shared_access import SharedAccessPlan, bank_conflicts, shared_access_plan
from minitriton.ir.shared_layouts import shared_for_mma_operand, shared_swizzled, shared_tma

__all__ = [
    "LdmatrixPlan",
    "MmaTile",
    "SharedAccessPlan",
    "adjacent_rows",
    "bank_conflicts",
    "blocked",
    "broadcast_result",
    "choose_mma_warps",
    "default_blocked",
    "ldmatrix_plan",
    "mma_accumulator",
    "mma_operand",
    "mma_tiles",
    "shared_access_plan",
    "shared_for_mma_operand",
    "shared_swizzled",
    "shared_tma",
]

WARP_SIZE = 32


class _Walk:
    """Hands out the coordinate bits of each dimension from the lowest upwards."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self.position = [1] * len(self.shape)

    def take(self, dim: int, size: int) -> list[tuple[int, ...]]:
        """Vectors for the next log2(size) bits of `dim`; zero vectors past the end of its
        granules, from where registers alone have them."""
        return self._vectors(dim, size, granule(self.shape[dim]))

    def _vectors(self, dim: int, size: int, end: int) -> list[tuple[int, ...]]:
        vectors = []
        for _ in range(log2_exact(size)):
            step = self.position[dim] if self.position[dim] < end else 0
            vectors.append(tuple(step * (d == dim) for d in range(len(self.shape))))
            self.position[dim] += step
        return vectors

    def rest(self, dims: Sequence[int]) -> list[tuple[int, ...]]:
        """Vectors for all bits not handed out yet, dimension after dimension."""
        ends = [hull(size) for size in self.shape]
        return [
            vector
            for dim in dims
            for vector in self._vectors(dim, ends[dim] // self.position[dim], ends[dim])
        ]


def blocked(
    shape: Sequence[int],
    size_per_thread: Sequence[int],
    threads_per_warp: Sequence[int],
    warps: Sequence[int],
    order: Sequence[int],
) -> LinearLayout:
    """Each thread holds a small block, lanes and then warps tile the blocks; order[0] is fastest.

    A tile larger than the thread grid repeats it in further registers, a smaller one is
    replicated over lanes and warps (never over registers).
    """
    walk = _Walk(shape)
    register = [vector for dim in order for vector in walk.take(dim, size_per_thread[dim])]
    lane = [vector for dim in order for vector in walk.take(dim, threads_per_warp[dim])]
    warp = [vector for dim in order for vector in walk.take(dim, warps[dim])]
    register += walk.rest(order)
    return LinearLayout.distributed(shape, filter(any, register), lane, warp)


def default_blocked(
    shape: Sequence[int], num_warps: int, order: Sequence[int] | None = None, vec: int = 1
) -> LinearLayout:
    """Blocked layout for coalesced access: lanes run along order[0] first, `vec` elements each.

    order defaults to C order. The vector shrinks where the tile would not feed every thread.
    """
    rank = len(shape)
    order = tuple(reversed(range(rank))) if order is None else tuple(order)
    size_per_thread, threads, warps = [1] * rank, [1] * rank, [1] * rank
    granules = [granule(size) for size in shape]
    if rank:
        fastest = order[0]
        each = max(1, prod(granules) // (WARP_SIZE * num_warps))
        size_per_thread[fastest] = max(1, min(vec, granules[fastest], each))
    lanes_left, warps_left = WARP_SIZE, num_warps
    for dim in order:
        room = granules[dim] // size_per_thread[dim]
        threads[dim] = min(room, lanes_left)
        lanes_left //= threads[dim]
        warps[dim] = min(room // threads[dim], warps_left)
        warps_left //= warps[dim]
    if rank:  # threads beyond the tile replicate it
        threads[order[-1]] *= lanes_left
        warps[order[-1]] *= warps_left
        return blocked(shape, size_per_thread, threads, warps, order)
    zeros = [()] * log2_exact(WARP_SIZE), [()] * log2_exact(num_warps)
    return LinearLayout.distributed((), [], *zeros)


def broadcast_result(layout: LinearLayout, shape: Sequence[int]) -> LinearLayout:
    """A layout of `shape` whose `broadcast_source` over the widened dimensions is `layout`.

    Bits of replicating lanes and warps take up the new elements first, registers the rest.
    """
    missing = [
        1 << (LinearLayout(tuple(shape), ()).dim_shifts[dim] + bit)
        for dim in reversed(range(layout.rank))
        if layout.shape[dim] != shape[dim]
        for bit in range(log2_exact(hull(shape[dim])))
    ]
    wide = LinearLayout(tuple(shape), layout.bases)
    flat = wide.to_flat()
    for name in ("lane", "warp"):
        flat[name] = [value or (missing.pop(0) if missing else 0) for value in flat[name]]
    flat["register"] = missing + flat["register"]
    return LinearLayout.from_flat(shape, flat)


def _warp_vectors(walk: _Walk, warps_per_dim: Sequence[int]) -> list[tuple[int, ...]]:
    rank = len(warps_per_dim)
    dims = (rank - 2, rank - 1, *reversed(range(rank - 2)))
    return [vector for dim in dims for vector in walk.take(dim, warps_per_dim[dim])]


def adjacent_rows(rows: int, elem_bits: int) -> tuple[int, ...]:
    """An order of the rows of A for reading it out of `shared_tma` memory along M: for each bit of
    a row's number in the fragments the bit of the tile's row.

    A thread's two rows of an instruction are neighbours. Which ones the lanes have keeps 8-byte
    loads of 32-bit elements, and `ldmatrix` on bytes, free of bank conflicts. rows >= 32.
    """
    placed = (1, 2, 3, 0) if elem_bits == 8 else (1, 4, 2, 0)  # bit 3 is the thread's second row
    left = [bit for bit in range(log2_exact(hull(rows))) if bit not in placed]
    return (*placed, *left)


def _in_order(
    vectors: Sequence[tuple[int, ...]], dim: int, order: Sequence[int] | None
) -> list[tuple[int, ...]]:
    """Vectors whose coordinate bits along `dim` are renamed."""
    if order is None:
        return list(vectors)
    return [
        tuple(
            sum(1 << order[bit] for bit in range(len(order)) if x >> bit & 1) if d == dim else x
            for d, x in enumerate(vector)
        )
        for vector in vectors
    ]


def mma_accumulator(
    shape: Sequence[int],
    warps_per_dim: Sequence[int],
    instr: tuple[int, int] = (16, 8),
    row_order: Sequence[int] | None = None,
) -> LinearLayout:
    """32-bit accumulator fragments of mma.sync m16n8 (instr (16, 8)) and wgmma (instr (16, N)).

    lane // 4 is the row, lane % 4 * 2 the column; register bit 0 adds column 1, bit 1 row 8,
    further bits columns 8, 16, ... up to instr[1]. Then warps are placed (rows fastest), then
    registers repeat along columns, then rows, then the batch dimension of a rank-3 tile.
    A tile smaller than the instruction keeps its replicating register bits.
    row_order: see `adjacent_rows`; None is the natural one.
    """
    m, n = len(shape) - 2, len(shape) - 1
    walk = _Walk(shape)
    register = walk.take(n, 2)
    lane = walk.take(n, 4) + walk.take(m, 8)
    register += walk.take(m, 2) + walk.take(n, instr[1] // 8)
    walk.take(m, instr[0] // 16)
    warp = _warp_vectors(walk, warps_per_dim)
    register += walk.rest((n, m, *reversed(range(m))))
    vectors = (_in_order(v, m, row_order) for v in (register, lane, warp))
    return LinearLayout.distributed(shape, *vectors)


def mma_operand(
    shape: Sequence[int],
    op_index: int,
    warps_per_dim: Sequence[int],
    elem_bits: int,
    row_order: Sequence[int] | None = None,
) -> LinearLayout:
    """Fragments of A (op_index 0, [..., M, K]) or B (1, [..., K, N]) of m16n8k(256/elem_bits).

    elem_bits: 8, 16 or 32 (tf32). Register bits from the lowest: position in a 32-bit register
    (along K); for A row 8; K half (offset 128/elem_bits); then tiles along K, tiles along M or
    N, batch. So the 32-bit registers a0..a3, b0..b1 of one instruction are consecutive.
    Warps that split the other operand replicate this one. ValueError where K is too small.
    row_order: of A, see `adjacent_rows`; None is the natural one.
    """
    rank = len(shape)
    k = rank - 1 if op_index == 0 else rank - 2
    free = rank - 2 if op_index == 0 else rank - 1
    packed = 32 // elem_bits
    if granule(shape[k]) < 8 * packed:
        raise ValueError(f"a dot of {elem_bits}-bit elements needs K >= {8 * packed} in such steps")
    walk = _Walk(shape)
    register = walk.take(k, packed)
    lane = walk.take(k, 4) + walk.take(free, 8)
    if op_index == 0:
        register += walk.take(free, 2)
    register += walk.take(k, 2)
    owners = list(warps_per_dim)
    replicas = rank - 1 if op_index == 0 else rank - 2
    first = 0 if op_index == 1 else log2_exact(owners[rank - 2])
    count = log2_exact(owners[replicas])
    owners[replicas] = 1
    warp = _warp_vectors(walk, owners)
    warp[first:first] = [(0,) * rank] * count
    register += walk.rest((k, free, *reversed(range(rank - 2))))
    vectors = (_in_order(v, free, row_order) for v in (register, lane, warp))
    return LinearLayout.distributed(shape, *vectors)


@dataclass(frozen=True)
class MmaTile:
    """One instruction of a warp: its place among the warp's own tiles, and element registers.

    a, b, c: register indices in fragment order; 32/elem_bits consecutive entries of a and b make
    up one 32-bit register of the instruction, low bits first.
    """

    batch: int
    m: int
    n: int
    k: int
    a: tuple[int, ...]
    b: tuple[int, ...]
    c: tuple[int, ...]


def mma_tiles(
    shape: Sequence[int], warps_per_dim: Sequence[int], elem_bits: int
) -> Iterator[MmaTile]:
    """The mma.sync m16n8 instructions of each warp for a dot of shape ([batch,] M, N, K).

    Registers index `mma_operand` and `mma_accumulator` of the same warps. Accumulators are
    revisited only after all tiles of one K step, so that independent instructions lie between.
    """
    *batch_shape, size_m, size_n, size_k = shape
    *batch_warps, warps_m, warps_n = warps_per_dim
    packed = 32 // elem_bits
    batches = max(1, batch_shape[0] // batch_warps[0]) if batch_shape else 1
    tiles_m = size_m // min(16 * warps_m, granule(size_m))  # warps beyond a granule replicate
    tiles_n = size_n // min(8 * warps_n, granule(size_n))
    tiles_k = max(1, size_k // (8 * packed))
    hull_m, hull_n, hull_k = map(hull, (tiles_m, tiles_n, tiles_k))  # registers of tiles there

    def registers(count: int, tile: int) -> tuple[int, ...]:
        return tuple(range(count * tile, count * (tile + 1)))

    for batch in range(batches):
        for k in range(tiles_k):
            for m in range(tiles_m):
                for n in range(tiles_n):
                    a = registers(4 * packed, k + hull_k * (m + hull_m * batch))
                    b = registers(2 * packed, k + hull_k * (n + hull_n * batch))
                    c = registers(4, n + hull_n * (m + hull_m * batch))
                    yield MmaTile(batch, m, n, k, a, b, c)


def choose_mma_warps(shape: Sequence[int], num_warps: int) -> tuple[int, ...]:
    """Warps per dimension of a ([batch,] M, N) accumulator: batch first, then the longer side
    (rows on a tie).

    Balanced sides minimise the operand bytes each warp reads. Warps that no dimension can use
    go to M, where they replicate.
    """
    warps = [1] * len(shape)
    smallest = [1] * (len(shape) - 2) + [16, 8]
    granules = [granule(size) for size in shape]
    left = num_warps
    for dim in range(len(shape) - 2):
        warps[dim] = min(granules[dim], left)
        left //= warps[dim]
    while left > 1:
        sides = [
            (shape[dim] // warps[dim], -dim)
            for dim in (len(shape) - 1, len(shape) - 2)
            if granules[dim] // warps[dim] > smallest[dim]
        ]
        dim = -max(sides)[1] if sides else len(shape) - 2
        warps[dim] *= 2
        left //= 2
    return tuple(warps)
