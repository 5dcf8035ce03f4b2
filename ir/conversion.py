"""Choose how a tile moves from one distributed layout to another.

In order of cost: nothing, renaming registers, shuffles within each warp, a round trip through
shared memory. `simulate` executes a plan with numpy and defines what it means.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from minitriton.ir import f2
from minitriton.ir.linear_layout import LinearLayout
from minitriton.ir.ragged import blocks, core
from minitriton.ir.scratch_layout import Chunk, choose_chunks, scratch_layout
from minitriton.ir.shared_access import SharedAccessPlan, shared_access_plan
from minitriton.ir.warp_shuffle import WarpShuffle, plan_shuffle, simulate_shuffle

if TYPE_CHECKING:
    import numpy as np

DEFAULT_SCRATCH_BYTES = 32 * 1024


@dataclass(frozen=True)
class NoMove:
    """Every thread already holds the right elements in the right registers."""


@dataclass(frozen=True)
class RegisterMove:
    """Result register i is source register source_of[i] of the same thread."""

    source_of: tuple[int, ...]


@dataclass(frozen=True)
class SharedRoundTrip:
    """For each chunk: store its source registers, barrier, load its result registers, and
    another barrier before the next chunk's stores.

    shared: layout of one chunk. store, load: register numbers count within the chunk; a Chunk
    maps them to registers of the tile. bytes: scratch for `together` chunks, which share their
    barriers. warp_local: each warp reads only what it wrote itself, so a warp-level barrier will
    do.
    """

    shared: LinearLayout
    store: SharedAccessPlan
    load: SharedAccessPlan
    chunks: tuple[Chunk, ...]
    bytes: int
    warp_local: bool
    together: int = 1


@dataclass(frozen=True)
class BlockShuffles:
    """The same shuffle for each block of a ragged tile."""

    shuffle: WarpShuffle
    blocks: tuple[Chunk, ...]


Conversion = NoMove | RegisterMove | WarpShuffle | SharedRoundTrip | BlockShuffles


def storage_bits(elem_bits: int) -> int:
    """Width of an element in a register or in shared memory: i1 and i4 take a byte."""
    return max(8, elem_bits)


@functools.lru_cache(maxsize=2048)
def plan_conversion(
    src: LinearLayout, dst: LinearLayout, elem_bits: int, max_scratch_bytes: int | None = None
) -> Conversion:
    """The cheapest way from `src` to `dst` (distributed layouts of the same tile).

    elem_bits: 1 to 64. max_scratch_bytes: shared memory a round trip may use; it is cut into
    chunks to fit where both layouts hold enough of the tile in registers, else plan.bytes is
    larger and the caller decides. Default 32 KiB. ValueError for different tiles.
    """
    if src == dst:
        return NoMove()
    if src.is_ragged and src.shape == dst.shape:
        return _plan_blocks(src, dst, elem_bits, max_scratch_bytes)
    bits = storage_bits(elem_bits)
    where = src.invert_and_compose(dst)
    moves = dict(where.bases)
    stays = (
        not any(lane or warp for _, lane, warp in moves["register"])
        and all(vector == (0, 1 << bit, 0) for bit, vector in enumerate(moves["lane"]))
        and all(vector == (0, 0, 1 << bit) for bit, vector in enumerate(moves["warp"]))
    )
    if stays:
        source_of = tuple(f2.span_elements([v[0] for v in moves["register"]]))
        return RegisterMove(source_of)
    same_warp = not any(v[2] for name in ("register", "lane") for v in moves[name]) and all(
        vector[2] == 1 << bit for bit, vector in enumerate(moves["warp"])
    )
    if same_warp:
        shuffle = plan_shuffle(where, dst, bits)
        if shuffle is not None:
            return shuffle
    limit = DEFAULT_SCRATCH_BYTES if max_scratch_bytes is None else max_scratch_bytes
    warp_local = same_warp and src.num_warps == dst.num_warps and not src.free_bits("warp")
    return _plan_round_trip(src, dst, bits, limit, warp_local)


def _plan_round_trip(
    src: LinearLayout, dst: LinearLayout, bits: int, limit: int, warp_local: bool
) -> SharedRoundTrip:
    chunks, part_src, part_dst = choose_chunks(src, dst, bits, limit)
    shared = scratch_layout(part_src, part_dst, bits)
    return SharedRoundTrip(
        shared,
        shared_access_plan(shared, part_src, bits),
        shared_access_plan(shared, part_dst, bits),
        chunks,
        (1 << shared.num_bits) * bits // 8,
        warp_local,
    )


def _plan_blocks(
    src: LinearLayout, dst: LinearLayout, elem_bits: int, max_scratch_bytes: int | None
) -> Conversion:
    """Of a ragged tile: what one block takes, for all of them."""
    plan = plan_conversion(core(src), core(dst), elem_bits, max_scratch_bytes)
    parts = tuple(map(Chunk, blocks(src), blocks(dst)))
    if isinstance(plan, WarpShuffle):
        return BlockShuffles(plan, parts)
    if isinstance(plan, SharedRoundTrip):
        chunks = tuple(
            Chunk(
                tuple(part.src_registers[r] for r in chunk.src_registers),
                tuple(part.dst_registers[r] for r in chunk.dst_registers),
            )
            for part in parts
            for chunk in plan.chunks
        )
        limit = DEFAULT_SCRATCH_BYTES if max_scratch_bytes is None else max_scratch_bytes
        together = min(max(1, limit // plan.bytes), len(chunks))
        return replace(plan, chunks=chunks, bytes=together * plan.bytes, together=together)
    source_of = [0] * dst.num_registers
    for part in parts:
        for index, register in enumerate(part.dst_registers):
            source = plan.source_of[index] if isinstance(plan, RegisterMove) else index
            source_of[register] = part.src_registers[source]
    return RegisterMove(tuple(source_of))


def simulate(
    plan: Conversion, src: LinearLayout, dst: LinearLayout, values: np.ndarray
) -> np.ndarray:
    """Execute `plan` on values [registers, lanes, warps] of `src`; the same for `dst`."""
    import numpy as np

    if isinstance(plan, NoMove):
        return values.copy()
    if isinstance(plan, RegisterMove):
        moved: np.ndarray = values[list(plan.source_of)]
        return moved
    if isinstance(plan, WarpShuffle):
        return simulate_shuffle(plan, values)
    result: np.ndarray = np.zeros((dst.num_registers, dst.num_lanes, dst.num_warps), values.dtype)
    if isinstance(plan, BlockShuffles):
        for block in plan.blocks:
            part = simulate_shuffle(plan.shuffle, values[list(block.src_registers)])
            result[list(block.dst_registers)] = part
        return result
    src, dst = core(src), core(dst)
    for chunk in plan.chunks:
        memory = np.zeros(1 << plan.shared.num_bits, values.dtype)
        written = np.zeros(memory.shape, bool)
        for registers, address, owner in _accesses(plan.store, src):
            for position, register in enumerate(registers):
                data = values[chunk.src_registers[register]]
                memory[(address + position)[owner]] = data[owner]
                written[(address + position)[owner]] = True
        for registers, address, _ in _accesses(plan.load, dst):
            for position, register in enumerate(registers):
                if not written[address + position].all():
                    raise ValueError("the plan loads an element that it never stored")
                result[chunk.dst_registers[register]] = memory[address + position]
        for register, original in plan.load.duplicates:
            result[chunk.dst_registers[register]] = result[chunk.dst_registers[original]]
    return result


def _accesses(
    plan: SharedAccessPlan, layout: LinearLayout
) -> list[tuple[tuple[int, ...], np.ndarray, np.ndarray]]:
    """Per group: registers, first element offset [lanes, warps], mask of the owning threads."""
    import numpy as np

    lanes = np.array(f2.span_elements(plan.lane_bases))[:, None]
    base = lanes ^ np.array(f2.span_elements(plan.warp_bases))
    lane, warp = np.ogrid[: layout.num_lanes, : layout.num_warps]
    owner = (lane & plan.free_lane_mask | warp & plan.free_warp_mask) == 0
    return [(g.registers, (base ^ g.xor_offset) + g.add_offset, owner) for g in plan.groups]
