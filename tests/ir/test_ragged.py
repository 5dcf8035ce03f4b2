"""Layouts of tiles that are no powers of two: which elements exist, and how these move."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitriton.ir import f2
from minitriton.ir.conversion import SharedRoundTrip, WarpShuffle, plan_conversion, simulate
from minitriton.ir.layouts import (
    choose_mma_warps,
    default_blocked,
    ldmatrix_plan,
    mma_accumulator,
    mma_operand,
    mma_tiles,
    shared_access_plan,
    shared_for_mma_operand,
    shared_tma,
)
from minitriton.ir.linear_layout import LinearLayout, granule, hull, segments
from minitriton.ir.matrix_descriptor import matrix_descriptor, operand_span
from minitriton.ir.ragged import Gap, blocks, core, extent, gaps, place_of
from minitriton.ir.reduction import (
    is_scannable,
    plan_reduction,
    plan_scan,
    scan_layout,
    simulate_reduction,
    simulate_scan,
)
from minitriton.ir.register_maps import (
    broadcast_registers,
    cat_registers,
    flip_registers,
    narrow_registers,
    narrowed,
)

RAGGED = (48, 80, 96, 112, 144, 160, 176, 192)


@st.composite
def ragged_shapes(draw, rank=None):
    rank = rank or draw(st.integers(1, 3))
    shape = [draw(st.sampled_from((1, 2, 8, 16, 32))) for _ in range(rank)]
    for dim in draw(st.sets(st.integers(0, rank - 1), min_size=1, max_size=2)):
        shape[dim] = draw(st.sampled_from(RAGGED))
    return tuple(shape)


@st.composite
def ragged_layouts(draw, shape, warps):
    """Of a shape, in any of the ways in which the compiler lays out tiles."""
    kinds = ["default", "default"]
    if len(shape) >= 2 and min(shape[-2:]) >= 16:
        kinds += ["accumulator", "operand"]
    kind = draw(st.sampled_from(kinds))
    if kind == "default":
        order = draw(st.permutations(range(len(shape))))
        return default_blocked(shape, warps, order, draw(st.sampled_from((1, 2, 4, 8))))
    grid = choose_mma_warps(shape, warps)
    if kind == "accumulator":
        return mma_accumulator(shape, grid)
    return mma_operand(shape, draw(st.integers(0, 1)), grid, 16)


def coordinates(layout):
    """int64 [registers that exist, lanes, warps, rank]."""
    return layout.table()[list(layout.registers)]


def elements(layout):
    """C-order numbers of the real elements, [registers that exist, lanes, warps]."""
    return np.ravel_multi_index(tuple(np.moveaxis(coordinates(layout), -1, 0)), layout.shape)


@settings(max_examples=50)
@given(st.data())
def test_registers_hold_each_element_and_nothing_else(data):
    shape = data.draw(ragged_shapes())
    layout = data.draw(ragged_layouts(shape, data.draw(st.sampled_from((1, 4, 8)))))
    numbers = elements(layout)  # refuses coordinates outside the shape
    registers = np.array(layout.registers)[:, None, None]
    lanes, warps = np.arange(32)[None, :, None], np.arange(layout.num_warps)[None, None, :]
    owner = (
        registers & layout.free_bits("register")
        | lanes & layout.free_bits("lane")
        | warps & layout.free_bits("warp")
    ) == 0
    assert sorted(numbers[owner].tolist()) == list(range(int(np.prod(shape))))
    assert LinearLayout.from_flat(shape, layout.to_flat()) == layout


def test_lanes_and_warps_stay_inside_a_granule():
    with pytest.raises(ValueError, match="beyond a granule"):
        LinearLayout.from_flat((48,), {"register": [16, 32], "lane": [1, 2, 4, 8, 16], "warp": []})
    with pytest.raises(ValueError, match="beyond a granule"):
        LinearLayout.from_flat((48,), {"register": [17, 32, 16], "lane": [1, 2, 4, 8], "warp": []})


@given(st.data())
def test_blocks_are_tiles_of_powers_of_two(data):
    shape = data.draw(ragged_shapes())
    layout = data.draw(ragged_layouts(shape, 4))
    part, whole = core(layout), layout.table()
    assert part.shape == tuple(map(granule, shape)) and not part.is_ragged
    found = set()
    for registers in blocks(layout):
        corner = whole[registers[0], 0, 0] - part.table()[0, 0, 0]
        assert (whole[list(registers)] == part.table() + corner).all()
        found.add(tuple(corner))
    counts = [size // granule(size) for size in shape]
    assert len(found) == np.prod(counts)
    assert sorted(r for b in blocks(layout) for r in b) == sorted(layout.registers)


@settings(max_examples=150)
@given(st.data())
def test_conversions_deliver_every_element(data):
    shape, warps = data.draw(ragged_shapes()), data.draw(st.sampled_from((1, 4, 8)))
    src, dst = (data.draw(ragged_layouts(shape, warps)) for _ in range(2))
    plan = plan_conversion(src, dst, data.draw(st.sampled_from((1, 8, 16, 32, 64))))
    values = np.full((src.num_registers, 32, warps), -1)
    values[list(src.registers)] = elements(src)
    result = simulate(plan, src, dst, values)
    assert (result[list(dst.registers)] == elements(dst)).all()


def test_blocks_share_barriers_as_far_as_memory_goes():
    src, dst = default_blocked((64, 192), 4, vec=8), mma_accumulator((64, 192), (4, 1))
    plan = plan_conversion(src, dst, 32)
    assert isinstance(plan, SharedRoundTrip) and not isinstance(plan, WarpShuffle)
    assert (len(plan.chunks), plan.together, plan.bytes) == (3, 2, 2 * 64 * 64 * 4)


@settings(max_examples=100)
@given(st.data())
def test_reductions_fold_what_exists(data):
    shape = data.draw(ragged_shapes())
    layout = data.draw(ragged_layouts(shape, data.draw(st.sampled_from((1, 4)))))
    axis = data.draw(st.integers(0, len(shape) - 1))
    tile = np.random.default_rng().integers(0, 1000, shape)
    values = np.full((layout.num_registers, 32, layout.num_warps), 1 << 40)
    values[list(layout.registers)] = tile.ravel()[elements(layout)]
    plan = plan_reduction(layout, axis)
    result = simulate_reduction(plan, values, np.add)
    expected = tile.sum(axis)
    if expected.ndim:
        expected = expected.ravel()[elements(plan.result)]
    assert (result == expected).all()


def composed(first, second):
    """x -> a x + b mod 2^16 after another, each a * 2^16 + b: associative, not commutative."""
    a, b, c, d = first >> 16, first & 0xFFFF, second >> 16, second & 0xFFFF
    return ((a * c & 0xFFFF) << 16) + (b * c + d & 0xFFFF)


@given(st.data())
def test_scans(data):
    shape = data.draw(ragged_shapes(2))
    axis, reverse = data.draw(st.integers(0, 1)), data.draw(st.booleans())
    layout = scan_layout(data.draw(ragged_layouts(shape, 4)), axis)
    assert is_scannable(layout, axis) and layout.shape == shape and layout.is_surjective
    tile = np.random.default_rng().integers(1, 1 << 32, shape)
    expected = np.flip(tile, axis).copy() if reverse else tile.copy()
    line = np.moveaxis(expected, axis, 0)
    for index in range(1, len(line)):
        line[index] = composed(line[index - 1], line[index])
    expected = np.flip(expected, axis) if reverse else expected
    values = np.zeros((layout.num_registers, 32, 4), np.int64)
    values[list(layout.registers)] = tile.ravel()[elements(layout)]
    plan = plan_scan(layout, axis, (8,), reverse)
    result = simulate_scan(plan, layout, axis, values, composed)
    assert (result[list(layout.registers)] == expected.ravel()[elements(layout)]).all()


def test_totals_are_carried_from_block_to_block():
    layout = default_blocked((192,), 1, vec=2)
    forward, back = plan_scan(layout, 0), plan_scan(layout, 0, reverse=True)
    assert forward.lines == ((0, 1), (2, 3), (4, 5)) and forward.chains == ((0, 1, 2),)
    assert forward.carried == {1, 2} and back.chains == ((2, 1, 0),)
    alone = default_blocked((64, 48), 1, (0, 1))  # a thread has whole rows
    assert plan_scan(alone, 1).chains == () and len(plan_scan(alone, 1).lines[0]) == 48


@given(st.data())
def test_shape_changes(data):
    shape = data.draw(ragged_shapes(2))
    layout = data.draw(ragged_layouts(shape, 4))
    flipped = layout.transpose((1, 0))
    assert flipped.registers == layout.registers
    assert (coordinates(flipped)[..., ::-1] == coordinates(layout)).all()
    row = layout.slice(0)
    assert row.shape == shape[1:] and set(elements(row).flat) == set(range(shape[1]))
    source = layout.broadcast_source(0)
    picks = np.array(broadcast_registers(layout, 0))[list(layout.registers)]
    assert set(picks) <= set(source.registers)
    assert (source.table()[picks][..., 1] == coordinates(layout)[..., 1]).all()


def test_reshapes_that_keep_elements_in_place():
    layout = default_blocked((192, 8), 4)
    for shape in ((192, 2, 4), (384, 4), (1, 1536), (96, 16)):
        assert (elements(layout.reshape(shape)) == elements(layout)).all()
    assert segments((4, 192, 8)) == [4, 1536]
    with pytest.raises(ValueError, match="cannot reshape"):
        layout.reshape((8, 192))


@given(st.sampled_from(RAGGED), st.sampled_from((4, 8)))
def test_parts_of_a_tile_are_registers(size, warps):
    layout = mma_accumulator((128, size), (warps, 1))
    part = narrowed(layout, 1, granule(size))
    assert part is not None and not part.is_ragged
    for start in range(0, size, granule(size)):
        table = layout.table()[narrow_registers(layout, 1, granule(size), start)]
        assert (table == part.table() + [0, start]).all()


# Shared memory


@st.composite
def slots(draw):
    """(shared layout, elem_bits) of a tile with a ragged dimension."""
    shape, bits = draw(ragged_shapes(2)), draw(st.sampled_from((8, 16)))
    order = draw(st.permutations((0, 1)))
    if draw(st.booleans()):
        return shared_for_mma_operand(shape, order, bits, draw(st.integers(0, 1))), bits
    span = operand_span(shape, tuple(order), bits // 8)
    if not span:
        return shared_for_mma_operand(shape, order, bits), bits
    return shared_tma(shape, order, bits, span), bits


@settings(max_examples=60)
@given(slots())
def test_elements_have_places_of_their_own(slot):
    shared, _ = slot
    offsets = np.arange(1 << shared.num_bits)
    exist = [shared.exists(index) for index in shared.flat_table().tolist()]
    places = [place_of(int(offset), gaps(shared)) for offset in offsets[exist]]
    assert len(set(places)) == np.prod(shared.shape)
    assert max(places) < extent(shared) <= 1 << shared.num_bits


def test_gaps():
    rows = shared_tma((176, 128), (1, 0), 16, 128)  # two panels of 176 rows
    assert gaps(rows) == (Gap(14, 80 * 64),) and extent(rows) == 176 * 128
    columns = shared_tma((64, 176), (1, 0), 16, 128)  # three panels, the last one not full
    assert extent(columns) == 3 * 64 * 64
    assert extent(shared_tma((64, 192), (1, 0), 16, 128)) == 64 * 192
    assert gaps(shared_tma((64, 256), (1, 0), 16, 128)) == ()


@settings(max_examples=100)
@given(st.data())
def test_accesses_reach_the_places(data):
    """What threads write, place by place, other threads read."""
    shared, bits = data.draw(slots())
    src, dst = (data.draw(ragged_layouts(shared.shape, 4)) for _ in range(2))
    memory = np.full(extent(shared), -1)
    values = np.full((src.num_registers, 32, 4), -1)
    values[list(src.registers)] = elements(src)
    plan = shared_access_plan(shared, src, bits)
    for group, start in thread_offsets(plan):
        for position, register in enumerate(group.registers):
            memory[placed(start + position, plan.gaps)] = values[register]
    assert (memory >= 0).sum() == np.prod(shared.shape)
    plan = shared_access_plan(shared, dst, bits)
    got = np.full((dst.num_registers, 32, 4), -1)
    for group, start in thread_offsets(plan):
        for position, register in enumerate(group.registers):
            got[register] = memory[placed(start + position, plan.gaps)]
    for register, original in plan.duplicates:
        got[register] = got[original]
    assert (got[list(dst.registers)] == elements(dst)).all()


def thread_offsets(plan):
    lanes = np.array(f2.span_elements(plan.lane_bases))[:, None]
    base = lanes ^ np.array(f2.span_elements(plan.warp_bases))
    return [(group, base ^ group.offset) for group in plan.groups]


def placed(offsets, between):
    return np.vectorize(lambda offset: place_of(int(offset), between))(offsets)


@pytest.mark.parametrize("shape", [(176, 128), (64, 176), (192, 64), (64, 96), (48, 64)], ids=str)
@pytest.mark.parametrize("order", [(1, 0), (0, 1)], ids=["rows", "columns"])
def test_descriptors_and_threads_agree(shape, order):
    """wgmma finds each 8 x 16 part of a tile where its layout puts it."""
    shared = shared_tma(shape, order, 16, operand_span(shape, order))
    descriptor = matrix_descriptor(shared, 1)
    assert descriptor is not None
    where = shared.invert()
    for free in range(0, shape[1], 64 if order[0] == 1 else 8):
        for depth in range(0, shape[0], 16):
            (offset,) = where.apply(dim0=depth, dim1=free)
            assert descriptor.offset(free, depth) == 2 * place_of(offset, gaps(shared))


@pytest.mark.parametrize("k", [48, 176, 192])
def test_ldmatrix_reads_whole_blocks(k):
    shared = shared_for_mma_operand((k, 64), (1, 0), 16, 1)
    operand = mma_operand((k, 64), 1, (4, 1), 16)
    plan = ldmatrix_plan(shared, operand, 16)
    assert plan is not None and plan.matrices == 4 and plan.conflicts == 1
    read = sorted(r for i in plan.instructions for block in i.registers for r in block)
    assert read == sorted(operand.registers)


@pytest.mark.parametrize(("m", "n", "k"), [(128, 192, 64), (64, 176, 48), (192, 96, 176)], ids=str)
def test_products_cover_the_tile(m, n, k):
    warps = choose_mma_warps((m, n), 4)
    a, b = mma_operand((m, k), 0, warps, 16), mma_operand((k, n), 1, warps, 16)
    c = mma_accumulator((m, n), warps)
    tiles = list(mma_tiles((m, n, k), warps, 16))
    for used, layout in (("a", a), ("b", b), ("c", c)):
        registers = {r for tile in tiles for r in getattr(tile, used)}
        assert registers == set(layout.registers)
    for tile in tiles[:: len(tiles) // 7 or 1]:
        (row, column), depth = c.apply(register=tile.c[0]), a.apply(register=tile.a[0])[1]
        assert a.apply(register=tile.a[0]) == (row, depth)
        assert b.apply(register=tile.b[0]) == (depth, column)


def test_hulls():
    assert [hull(size) for size in (1, 2, 48, 64, 176)] == [1, 2, 64, 64, 256]


@given(st.data())
def test_blocks_side_by_side_and_flipped(data):
    shape = data.draw(ragged_shapes(2))
    axis = data.draw(st.integers(0, 1))
    layout = data.draw(ragged_layouts(shape, 4))
    left, right = np.random.default_rng().integers(0, 1 << 32, (2, *shape))
    values = np.zeros((2, layout.num_registers, 32, 4), np.int64)
    for operand, tile in enumerate((left, right)):
        values[operand][list(layout.registers)] = tile.ravel()[elements(layout)]
    both = layout.cat(axis)
    picked = np.stack([values[o][r] for o, r in cat_registers(layout, axis)])
    expected = np.concatenate((left, right), axis).ravel()[elements(both)]
    assert (picked[list(both.registers)] == expected).all()
    block = granule(shape[axis])
    parts = np.split(left, shape[axis] // block, axis)
    expected = np.concatenate(parts[::-1], axis).ravel()[elements(layout)]
    assert (values[0][flip_registers(layout, axis)][list(layout.registers)] == expected).all()
