"""The algebra of LinearLayout against brute force over every (register, lane, warp)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitriton.ir import f2
from minitriton.ir.layouts import broadcast_result, default_blocked, mma_accumulator
from minitriton.ir.linear_layout import LinearLayout, log2_exact
from minitriton.ir.register_maps import (
    broadcast_registers,
    cat_registers,
    join_registers,
    narrow_registers,
    narrowed,
    slice_registers,
    split_registers,
)


def elements(layout):
    """int64 [registers, lanes, warps]: the number each element of an arange tile would have."""
    tile = np.arange(1 << layout.num_bits).reshape(layout.shape)
    return spread(tile, layout)


def spread(tile, layout):
    table = layout.table()
    return tile[tuple(table[..., dim] for dim in range(layout.rank))]


@given(st.lists(st.integers(0, 255), max_size=8), st.lists(st.integers(0, 255), max_size=8))
def test_f2_spaces(left, right):
    left_set, right_set = set(f2.span_elements(left)), set(f2.span_elements(right))
    assert set(f2.span_elements(f2.intersection(left, right))) == left_set & right_set
    assert 1 << f2.rank(left) == len(left_set)
    outside = f2.span_elements(f2.complement(left, 8))
    assert {a ^ b for a in left_set for b in outside} == set(range(256))
    assert len(left_set) * len(outside) == 256
    span = f2.Span(left)
    for target in (*right, 0):
        mask = span.solve(target)
        assert (mask is not None) == (target in left_set)
        if mask is not None:
            assert f2.combine(left, mask) == target


@given(st.data())
def test_apply_matches_definition(some_layouts, data):
    (layout,) = data.draw(some_layouts(1))
    register = data.draw(st.integers(0, layout.num_registers - 1))
    lane = data.draw(st.integers(0, 31))
    warp = data.draw(st.integers(0, layout.num_warps - 1))
    expected = [0] * layout.rank
    for (_, vectors), value in zip(layout.bases, (register, lane, warp), strict=True):
        for bit, vector in enumerate(vectors):
            if value >> bit & 1:
                expected = [a ^ b for a, b in zip(expected, vector, strict=True)]
    assert layout.apply(register=register, lane=lane, warp=warp) == tuple(expected)
    table = layout.table()
    assert table.shape == (layout.num_registers, 32, layout.num_warps, layout.rank)
    assert table[register, lane, warp].tolist() == expected
    arrays = layout.apply(register=np.arange(layout.num_registers), lane=lane, warp=warp)
    assert [a[register] for a in arrays] == expected


@given(st.data())
def test_serialisation_round_trip(some_layouts, data):
    (layout,) = data.draw(some_layouts(1))
    flat = layout.to_flat()
    assert LinearLayout.from_flat(layout.shape, flat) == layout
    by_name = dict(sorted(flat.items()))
    again = LinearLayout.from_flat(layout.shape, by_name)
    assert again == layout and hash(again) == hash(layout) and str(again) == str(layout)


@given(st.data())
def test_owners_are_unique(some_layouts, data):
    (layout,) = data.draw(some_layouts(1))
    grid = np.ix_(*(range(layout.in_size(name)) for name in layout.in_dims))
    owner = np.ones((), bool)
    for index, name in zip(grid, layout.in_dims, strict=True):
        owner = owner & ((index & layout.free_bits(name)) == 0)
    owned = elements(layout)[owner]
    assert layout.is_surjective
    assert sorted(owned) == list(range(1 << layout.num_bits))
    assert layout.is_injective == (owner.all())


@given(st.data())
def test_invert_gives_the_owner(some_layouts, data):
    (layout,) = data.draw(some_layouts(1))
    inverse = layout.invert()
    for index in range(1 << layout.num_bits):
        coordinates = layout.unflatten(index)
        names = dict(zip(inverse.in_dims, coordinates, strict=True))
        place = dict(zip(layout.in_dims, inverse.apply(**names), strict=True))
        assert layout.apply(**place) == coordinates
        assert all(place[name] & layout.free_bits(name) == 0 for name in place)


def test_invert_refuses_missing_elements():
    layout = LinearLayout.from_flat((4,), {"register": [1], "lane": [], "warp": []})
    assert not layout.is_surjective
    with pytest.raises(ValueError, match="not every element"):
        layout.invert()


@given(st.data())
def test_invert_and_compose_finds_the_element(some_layouts, data):
    src, dst = data.draw(some_layouts(2))
    where = src.invert_and_compose(dst)
    assert where.compose(src) == dst
    held = elements(src)
    lanes_used = where.table()
    for name, axis in (("lane", 1), ("warp", 2)):
        # keeping the lane (warp) wherever the element is there too is what conversions rely on
        here = [
            set(held[:, lane, warp].flat) if axis == 1 else set(held[:, :, warp].flat)
            for warp in range(src.num_warps)
            for lane in (range(32) if axis == 1 else range(1))
        ]
        wanted = elements(dst)
        places = itertools.product(range(dst.num_warps), range(32) if axis == 1 else range(1))
        possible = all(
            set((wanted[:, lane, warp] if axis == 1 else wanted[:, :, warp]).flat) <= held_here
            for (warp, lane), held_here in zip(places, here, strict=True)
        )
        if possible:
            own = np.arange(dst.in_size(name))
            own = own[None, :, None] if axis == 1 else own[None, None, :]
            assert (lanes_used[..., axis] == own).all()


@given(st.data())
def test_slice_and_broadcast(some_layouts, data):
    (layout,) = data.draw(some_layouts(1))
    dim = data.draw(st.integers(0, layout.rank - 1))
    tile = np.arange(1 << layout.num_bits).reshape(layout.shape)
    lines = tile.min(axis=dim)
    sliced = layout.slice(dim)
    assert sliced.shape == lines.shape and sliced.num_lanes == 32
    first = spread(tile.min(axis=dim, keepdims=True) + 0 * tile, layout)
    assert (spread(lines, sliced) == first[slice_registers(layout, dim)]).all()
    assert all(map(any, dict(sliced.bases)["register"])) or sliced.num_registers == 1

    dims = data.draw(st.sets(st.integers(0, layout.rank - 1)))
    source = layout.broadcast_source(dims)
    narrow_shape = tuple(1 if d in dims else n for d, n in enumerate(layout.shape))
    narrow = np.arange(np.prod(narrow_shape)).reshape(narrow_shape)
    wide = np.broadcast_to(narrow, layout.shape)
    copied = spread(narrow, source)[broadcast_registers(layout, dims)]
    assert (spread(wide, layout) == copied).all()
    assert layout.squeeze_dim_to_one(dim).drop_dim(dim) == sliced
    assert sliced.expand_dims(dim) == layout.broadcast_source(dim)


@given(st.data())
def test_broadcast_result_has_the_source(some_layouts, data):
    (layout,) = data.draw(some_layouts(1))
    dim = data.draw(st.integers(0, layout.rank - 1))
    narrow = layout.squeeze_dim_to_one(dim)
    wide = broadcast_result(narrow, layout.shape)
    assert wide.is_surjective and wide.broadcast_source(dim) == narrow.drop_zero_registers()


@given(st.data())
def test_reshape_transpose_keep_registers(some_layouts, data):
    (layout,) = data.draw(some_layouts(1))
    order = data.draw(st.permutations(range(layout.rank)))
    tile = np.arange(1 << layout.num_bits).reshape(layout.shape)
    values = spread(tile, layout)
    assert (spread(tile.transpose(order), layout.transpose(order)) == values).all()
    bits = layout.num_bits
    cut = data.draw(st.integers(0, bits))
    shape = (1 << cut, 1, 1 << (bits - cut))
    assert (spread(tile.reshape(shape), layout.reshape(shape)) == values).all()
    dim = data.draw(st.integers(-layout.rank - 1, layout.rank))
    grown = layout.expand_dims(dim)
    assert (spread(np.expand_dims(tile, dim), grown) == values).all()
    assert grown.drop_dim(grown.shape.index(1) if dim < 0 else dim).num_bits == bits


@given(st.data())
def test_join_split_cat(some_layouts, data):
    (layout,) = data.draw(some_layouts(1))
    size, count = 1 << layout.num_bits, layout.num_registers
    tiles = [np.arange(size).reshape(layout.shape), np.arange(size, 2 * size).reshape(layout.shape)]
    values = [spread(tile, layout) for tile in tiles]
    joined = layout.join()
    expected = np.stack([values[half][r] for half, r in join_registers(count)])
    assert (spread(np.stack(tiles, axis=-1), joined) == expected).all()
    assert joined.can_split() and joined.split() == layout
    for half, registers in enumerate(split_registers(joined)):
        assert (expected[registers] == values[half]).all()
    dim = data.draw(st.integers(0, layout.rank - 1))
    expected = np.stack([values[half][r] for half, r in cat_registers(layout, dim)])
    assert (spread(np.concatenate(tiles, axis=dim), layout.cat(dim)) == expected).all()


@given(st.data())
def test_narrow(some_layouts, data):
    (layout,) = data.draw(some_layouts(1))
    dim = data.draw(st.integers(0, layout.rank - 1))
    size = 1 << data.draw(st.integers(0, log2_exact(layout.shape[dim])))
    part = narrowed(layout, dim, size)
    if part is None:
        with pytest.raises(ValueError, match="do not tell apart"):
            narrow_registers(layout, dim, size, 0)
        return
    values = elements(layout)
    tile = np.arange(values.max() + 1).reshape(layout.shape)
    for start in range(0, layout.shape[dim], size):
        cut = np.take(tile, range(start, start + size), dim)
        assert (spread(cut, part) == values[narrow_registers(layout, dim, size, start)]).all()


def test_accumulators_narrow_to_accumulators():
    for shape, warps in (((128, 256), (8, 1)), ((64, 128), (2, 2)), ((2, 64, 64), (1, 4, 1))):
        layout, dim = mma_accumulator(shape, warps), len(shape) - 1
        part = mma_accumulator((*shape[:-1], 32), warps)
        assert narrowed(layout, dim, 32) == part
        assert narrowed(layout, dim - 1, 16) is None  # warps tell rows apart
    assert narrowed(mma_accumulator((64, 128), (2, 2)), 1, 8) is None


def test_split_needs_one_register_bit():
    by_lane = default_blocked((64, 2), 1)
    assert by_lane.can_split() is False
    with pytest.raises(ValueError, match="not told apart"):
        by_lane.split()
    with pytest.raises(ValueError, match="not told apart"):
        split_registers(by_lane)


def brute_vector_run(layout, dim):
    values = layout.table()
    best = 1
    while 2 * best <= min(layout.num_registers, layout.shape[dim]):
        width = 2 * best
        runs = values.reshape(-1, width, *values.shape[1:])
        steps = np.zeros(layout.rank, int)
        steps[dim] = 1
        walk = runs[:, :1] + np.arange(width)[:, None, None, None] * steps
        if not (walk == runs).all() or (runs[:, 0, ..., dim] % width).any():
            break
        best = width
    return best


@settings(max_examples=200)
@given(st.data())
def test_vector_runs(some_layouts, data):
    (layout,) = data.draw(some_layouts(1))
    dim = data.draw(st.integers(0, layout.rank - 1))
    run = layout.vector_run(dim)
    assert run == brute_vector_run(layout, dim)
    limit = data.draw(st.sampled_from([1, 2, 4, 8, 64]))
    found = layout.contiguous_registers(dim, limit)
    assert min(run, limit) <= found.width <= limit
    used = [register for group in found.groups for register in group]
    assert sorted((*used, *(r for r, _ in found.duplicates))) == list(range(layout.num_registers))
    table = layout.table()
    for group in found.groups:
        start = table[group[0]]
        assert not (start[..., dim] % found.width).any()
        for position, register in enumerate(group):
            moved = start.copy()
            moved[..., dim] += position
            assert (table[register] == moved).all()
    for register, original in found.duplicates:
        assert original in used and (table[register] == table[original]).all()


def test_bad_layouts_are_refused():
    with pytest.raises(ValueError, match="no elements"):
        LinearLayout.from_flat((0,), {"register": [], "lane": [], "warp": []})
    with pytest.raises(ValueError, match="outside the tile"):
        LinearLayout.from_flat((4,), {"register": [4], "lane": [], "warp": []})
    with pytest.raises(ValueError, match="different tiles"):
        default_blocked((4,), 1).invert_and_compose(default_blocked((8,), 1))
    with pytest.raises(ValueError, match="no permutation"):
        default_blocked((4, 4), 1).transpose((0, 0))
