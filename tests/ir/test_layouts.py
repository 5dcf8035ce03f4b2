"""Layout constructors, shared-memory access plans and ldmatrix plans, against the definitions
in the PTX ISA (fragment figures of mma.m16n8k*, ldmatrix) and brute force over addresses."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitriton.ir import f2
from minitriton.ir.byte_transpose import byte_transpose_plan
from minitriton.ir.layouts import (
    adjacent_rows,
    bank_conflicts,
    blocked,
    choose_mma_warps,
    default_blocked,
    ldmatrix_plan,
    mma_accumulator,
    mma_operand,
    mma_tiles,
    shared_access_plan,
    shared_for_mma_operand,
    shared_swizzled,
    shared_tma,
)
from minitriton.ir.linear_layout import LinearLayout

# Distributed layouts


@given(st.data())
def test_blocked_is_div_mod_arithmetic(data):
    """Tile size = thread grid: coordinates are digits of register, lane and warp."""
    rank = data.draw(st.integers(1, 3))
    order = data.draw(st.permutations(range(rank)))
    size = [1 << data.draw(st.integers(0, 2)) for _ in range(rank)]
    digits = [data.draw(st.integers(0, rank - 1)) for _ in range(7)]
    threads = [1 << digits[:5].count(d) for d in range(rank)]
    warps = [1 << digits[5:].count(d) for d in range(rank)]
    shape = [s * t * w for s, t, w in zip(size, threads, warps, strict=True)]
    layout = blocked(shape, size, threads, warps, order)
    for register, lane, warp in itertools.product(range(layout.num_registers), (0, 7, 31), (0, 3)):
        expected = [0] * rank
        r, t, w = register, lane, warp
        for dim in order:
            inner = r % size[dim] + size[dim] * (t % threads[dim])
            expected[dim] = inner + size[dim] * threads[dim] * (w % warps[dim])
            r, t, w = r // size[dim], t // threads[dim], w // warps[dim]
        assert layout.apply(register=register, lane=lane, warp=warp) == tuple(expected)


def test_blocked_repeats_and_replicates():
    large = blocked((256,), (4,), (32,), (1,), (0,))
    assert large.to_flat() == {"register": [1, 2, 128], "lane": [4, 8, 16, 32, 64], "warp": []}
    small = blocked((32,), (4,), (32,), (4,), (0,))
    assert small.to_flat() == {"register": [1, 2], "lane": [4, 8, 16, 0, 0], "warp": [0, 0]}
    assert (small.free_bits("lane"), small.free_bits("warp")) == (24, 3)
    tiny = blocked((2,), (4,), (32,), (1,), (0,))
    assert tiny.num_registers == 2


@given(
    st.lists(st.integers(0, 5), min_size=0, max_size=3),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.data(),
)
def test_default_blocked(bits, warps, vec, data):
    shape = tuple(1 << b for b in bits)
    order = data.draw(st.permutations(range(len(shape))))
    layout = default_blocked(shape, warps, order, vec)
    assert layout.is_surjective and layout.num_warps == warps and layout.num_lanes == 32
    size = 1 << layout.num_bits
    assert layout.num_registers == max(1, size // (32 * warps))
    if shape:
        expected = max(1, min(vec, shape[order[0]], size // (32 * warps)))
        assert layout.contiguous_registers(order[0], vec).width >= expected


def fragment_rows_cols(which, bits):
    """(row, column) of element i in lane l, in the words of the PTX ISA."""
    per = 32 // bits

    def a(lane, i):
        word, inside = divmod(i, per)
        row = lane // 4 + (8 if word in (1, 3) else 0)
        return row, (lane % 4) * per + inside + (4 * per if word >= 2 else 0)

    def b(lane, i):
        word, inside = divmod(i, per)
        return (lane % 4) * per + inside + 4 * per * word, lane // 4

    def c(lane, i):
        return lane // 4 + (8 if i >= 2 else 0), (lane % 4) * 2 + i % 2

    return {"a": a, "b": b, "c": c}[which]


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("grid", [(1, 1), (2, 2), (4, 1), (1, 4), (2, 1, 2), (2, 2, 1)])
def test_mma_fragments(bits, grid):
    step = 256 // bits
    *batch, m, n, k = (*(4,) * (len(grid) - 2), 64, 32, 2 * step)
    acc = mma_accumulator((*batch, m, n), grid)
    a = mma_operand((*batch, m, k), 0, grid, bits)
    b = mma_operand((*batch, k, n), 1, grid, bits)
    *_, warps_m, warps_n = grid
    seen = set()
    for tile in mma_tiles((*batch, m, n, k), grid, bits):
        assert len(tile.a) == 16 * step // 32 and len(tile.b) == 8 * step // 32
        for warp, lane in itertools.product(range(acc.num_warps), (0, 5, 30)):
            place = {"lane": lane, "warp": warp}
            wm, wn, wb = warp % warps_m, warp // warps_m % warps_n, warp // (warps_m * warps_n)
            row = 16 * (wm + warps_m * tile.m)
            col = 8 * (wn + warps_n * tile.n)
            lead = (wb + (grid[0] if batch else 1) * tile.batch,) if batch else ()
            for which, layout, registers, origin in (
                ("a", a, tile.a, (row, step * tile.k)),
                ("b", b, tile.b, (step * tile.k, col)),
                ("c", acc, tile.c, (row, col)),
            ):
                where = fragment_rows_cols(which, bits)
                for i, register in enumerate(registers):
                    r, c = where(lane, i)
                    expected = (*lead, origin[0] + r, origin[1] + c)
                    assert layout.apply(register=register, **place) == expected
            seen.add((lead, row, col, tile.k))
    assert len(seen) == (batch[0] if batch else 1) * (m // 16) * (n // 8) * (k // step)


def test_small_tiles_keep_whole_fragments():
    a, acc = mma_operand((8, 16), 0, (2, 1), 16), mma_accumulator((8, 4), (2, 1))
    assert a.num_registers == 8 and acc.num_registers == 4
    assert a.is_surjective and acc.is_surjective
    (tile,) = mma_tiles((8, 4, 16), (2, 1), 16)
    assert (tile.a, tile.b, tile.c) == (tuple(range(8)), tuple(range(4)), tuple(range(4)))
    with pytest.raises(ValueError, match="K >= 16"):
        mma_operand((16, 8), 0, (1, 1), 16)


def test_wgmma_accumulator():
    """D fragment of wgmma m64nNk16: warps stack 16 rows, registers run along all N columns."""
    layout = mma_accumulator((128, 256), (4, 2), instr=(16, 128))
    for warp, lane, i in itertools.product(range(8), (0, 13, 31), range(0, 64, 7)):
        row = 16 * (warp % 4) + lane // 4 + 8 * (i // 2 % 2)
        col = 128 * (warp // 4) + 8 * (i // 4) + lane % 4 * 2 + i % 2
        assert layout.apply(register=i, lane=lane, warp=warp) == (row, col)
    assert layout.apply(register=64, lane=0, warp=0) == (64, 0)


def test_choose_mma_warps():
    assert choose_mma_warps((128, 128), 4) == (2, 2)
    assert choose_mma_warps((128, 32), 4) == (4, 1)
    assert choose_mma_warps((16, 128), 8) == (1, 8)
    assert choose_mma_warps((16, 8), 4) == (4, 1)
    assert choose_mma_warps((8, 64, 64), 4) == (4, 1, 1)
    assert choose_mma_warps((2, 64, 64), 8) == (2, 2, 2)


# Shared memory


@given(st.data())
def test_swizzle_formula(data):
    shape = (1 << data.draw(st.integers(0, 5)), 1 << data.draw(st.integers(0, 6)))
    order = data.draw(st.sampled_from([(1, 0), (0, 1)]))
    vec, per_phase, phases = (1 << data.draw(st.integers(0, 3)) for _ in range(3))
    layout = shared_swizzled(shape, order, vec, per_phase, phases)
    assert layout.is_surjective and layout.is_injective
    width = shape[order[0]]
    for offset in range(shape[0] * shape[1]):
        row, col = divmod(offset, width)
        col ^= row // per_phase % phases * vec % width
        coordinates = layout.apply(offset=offset)
        assert (coordinates[order[1]], coordinates[order[0]]) == (row, col)


@pytest.mark.parametrize("swizzle", [16, 32, 64, 128])
@pytest.mark.parametrize("bits", [8, 16, 32])
def test_tma_swizzle_acts_on_addresses(swizzle, bits):
    rows, cols = 16, 2 * swizzle * 8 // bits
    layout = shared_tma((rows, cols), (1, 0), bits, swizzle)
    panel = swizzle * 8 // bits
    for offset in range(rows * cols):
        address = offset * bits // 8
        plain = address ^ ((address >> 7 & (swizzle // 16 - 1)) << 4)
        index, byte = divmod(plain, swizzle)
        expected = (index % rows, index // rows * panel + byte * 8 // bits)
        assert layout.apply(offset=offset) == expected


def base_offsets(plan, warps):
    lanes = np.array(f2.span_elements(plan.lane_bases))[:, None]
    return lanes ^ np.array(f2.span_elements(plan.warp_bases))[None, :warps]


@given(st.data())
def test_shared_access_reads_the_right_elements(some_layouts, data):
    (layout,) = data.draw(some_layouts(1))
    rank = layout.rank
    order = data.draw(st.permutations(range(rank)))
    vec, per_phase, phases = (1 << data.draw(st.integers(0, 3)) for _ in range(3))
    shared = shared_swizzled(layout.shape, order, vec, per_phase, phases)
    bits = data.draw(st.sampled_from([8, 16, 32, 64]))
    plan = shared_access_plan(shared, layout, bits)
    memory = shared.flat_table()
    expected = layout.flat_table()
    base = base_offsets(plan, layout.num_warps)
    covered = []
    for group in plan.groups:
        assert len(group.registers) == plan.vec <= 128 // bits
        address = (base ^ group.xor_offset) + group.add_offset
        assert (address == base ^ group.offset).all() and not (address % plan.vec).any()
        if group.add_is_legal:
            assert (address == base + group.offset).all()
        for position, register in enumerate(group.registers):
            assert (memory[address + position] == expected[register]).all()
            covered.append(register)
    copies = [register for register, _ in plan.duplicates]
    assert sorted(covered + copies) == list(range(layout.num_registers))
    for register, original in plan.duplicates:
        assert original in covered and (expected[register] == expected[original]).all()


def test_row_access_is_vectorised():
    shared = shared_for_mma_operand((64, 64), (1, 0), 16)
    plan = shared_access_plan(shared, default_blocked((64, 64), 4, vec=8), 16)
    assert plan.vec == 8 and len(plan.groups) == 4
    assert len({group.xor_offset for group in plan.groups}) == 1


@pytest.mark.parametrize("order", [(1, 0), (0, 1)])
@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("inner_bytes", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("index", [0, 1])
def test_operand_swizzle_is_conflict_free(order, bits, inner_bytes, index):
    inner = inner_bytes * 8 // bits
    shape = (inner, 64) if order == (0, 1) else (64, inner)
    k_dim = 1 - index
    if shape[k_dim] < 256 // bits:
        pytest.skip("no instruction has so small a K")
    shared = shared_for_mma_operand(shape, order, bits, index)
    assert shared.is_surjective and shared.is_injective
    writer = default_blocked(shape, 4, order, 128 // bits)
    if shape[0] * shape[1] * bits >= 128 * 128:
        assert shared_access_plan(shared, writer, bits).vec == 128 // bits
        assert bank_conflicts(shared, writer, 128 // bits, bits) == 1
    operand = mma_operand(shape, index, (2, 2), bits)
    plan = ldmatrix_plan(shared, operand, bits)
    assert (plan is None) == (bits != 16 and order[0] != k_dim)
    if plan is not None:
        assert plan.conflicts == 1
        assert plan.transposed == (order[0] != k_dim)
    else:
        access = shared_access_plan(shared, operand, bits)
        # narrow rows leave too few 16-byte chunks to spread four rows over
        narrow = inner_bytes < (64 if bits == 8 else 32)
        assert bank_conflicts(shared, operand, access.vec, bits) <= (4 if narrow else 1)


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("rows", [64, 128, 256])
@pytest.mark.parametrize("warps", [4, 8, 16])
def test_adjacent_rows_rename_the_rows_of_fragments(bits, rows, warps):
    if rows < 16 * warps:
        pytest.skip("more warps than rows")
    order, shape = adjacent_rows(rows, bits), (rows, 1024 // bits)
    assert sorted(order) == list(range(rows.bit_length() - 1))
    renamed = np.zeros(rows, int)
    for bit, new in enumerate(order):
        renamed += (np.arange(rows) >> bit & 1) << new
    for depth, plain, ordered in (
        (shape[1], mma_operand(shape, 0, (warps, 1), bits),
         mma_operand(shape, 0, (warps, 1), bits, order)),
        (64, mma_accumulator((rows, 64), (warps, 1)),
         mma_accumulator((rows, 64), (warps, 1), row_order=order)),
    ):  # fmt: skip
        row, column = np.divmod(plain.flat_table(), depth)
        assert (ordered.flat_table() == renamed[row] * depth + column).all()


@pytest.mark.parametrize("rows", [32, 64, 128, 256])
@pytest.mark.parametrize("depth", [8, 16, 32, 64])
def test_adjacent_rows_of_words_are_read_in_pairs_without_conflicts(rows, depth):
    warps = min(8, rows // 16)
    operand = mma_operand((rows, depth), 0, (warps, 1), 32, adjacent_rows(rows, 32))
    slot = shared_tma((rows, depth), (0, 1), 32)
    assert shared_access_plan(slot, operand, 32).vec == 2
    assert bank_conflicts(slot, operand, 2, 32) == 1
    plain = mma_operand((rows, depth), 0, (warps, 1), 32)
    assert shared_access_plan(slot, plain, 32).vec == 1 and bank_conflicts(slot, plain, 1, 32) == 2


@pytest.mark.parametrize("rows", [32, 64, 128, 256])
@pytest.mark.parametrize("depth", [32, 64, 128])
@pytest.mark.parametrize("warps", [1, 4, 8])
def test_byte_transposes_load_the_fragment(rows, depth, warps):
    """What ldmatrix.trans and the byte permutes give, on memory of distinct pairs."""
    if rows < 16 * warps:
        pytest.skip("more warps than rows")
    operand = mma_operand((rows, depth), 0, (warps, 1), 8, adjacent_rows(rows, 8))
    slot = shared_tma((rows, depth), (0, 1), 8)
    plan = byte_transpose_plan(slot, operand)
    assert plan is not None and plan.conflicts == 1
    units = slot.flat_table().reshape(-1, 2)
    pairs = units[:, 0] * 100000 + units[:, 1]
    table, base, covered = operand.flat_table(), base_offsets(plan, warps), []
    lane = np.arange(32)
    for instruction, warp in itertools.product(plan.instructions, range(warps)):
        address = (base[:, warp] ^ instruction.xor_offset) + instruction.add_offset
        assert not (address % 16).any()
        words = ldmatrix(pairs, address // 2, 4, True)  # [block, lane, two pairs of bytes]
        halves = np.stack(np.divmod(words, 100000), axis=-1).reshape(4, 32, 4)
        for half, row in itertools.product(range(2), range(2)):
            low, high = halves[2 * half, :, row::2], halves[2 * half + 1, :, row::2]
            exchanged = (lane & 2 != 0)[:, None]
            word = np.concatenate(
                [np.where(exchanged, high, low), np.where(exchanged, low, high)], axis=1
            )
            first = instruction.first + 8 * half + 4 * row
            assert (word == table[first : first + 4, :, warp].T).all()
            covered += range(first, first + 4) if warp == 0 else ()
    assert sorted(covered) == list(range(operand.num_registers))


def test_byte_transposes_of_other_tiles():
    slot = shared_tma((64, 32), (0, 1), 8)
    assert byte_transpose_plan(slot, mma_operand((64, 32), 0, (4, 1), 8)) is None
    ordered = mma_operand((64, 32), 0, (4, 1), 8, adjacent_rows(64, 8))
    assert byte_transpose_plan(shared_tma((64, 32), (1, 0), 8), ordered) is None
    assert byte_transpose_plan(slot, default_blocked((64, 32), 4, vec=4)) is None


def ldmatrix(memory, addresses, matrices, transposed):
    """PTX ISA: memory of 16-bit units, 32 row addresses (in units); [matrices, 32 lanes, 2]."""
    result = np.zeros((matrices, 32, 2), memory.dtype)
    for matrix in range(matrices):
        block = np.stack([memory[a : a + 8] for a in addresses[8 * matrix : 8 * matrix + 8]])
        if transposed:
            block = block.T
        for lane in range(32):
            result[matrix, lane] = block[lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2]
    return result


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("order", [(1, 0), (0, 1)])
@pytest.mark.parametrize("kind", ["a", "b", "c"])
@pytest.mark.parametrize("shape", [(32, 32), (64, 128), (16, 64)])
def test_ldmatrix_plan_loads_the_fragment(bits, order, kind, shape):
    grid = (2, 2)
    if kind == "c":
        operand = mma_accumulator(shape, grid)
    else:
        index = "ab".index(kind)
        if shape[1 - index] < 256 // bits:
            pytest.skip("no instruction has so small a K")
        operand = mma_operand(shape, index, grid, bits)
    shared = shared_for_mma_operand(shape, order, bits)
    plan = ldmatrix_plan(shared, operand, bits)
    if plan is None:
        assert bits != 16
        return
    # pieces: 16-bit units of each element, tagged so that every unit of memory is distinct
    elements = shared.flat_table()
    if bits == 8:
        pairs = elements.reshape(-1, 2)
        units = pairs[:, 0] * 100000 + pairs[:, 1]
    elif bits == 16:
        units = elements
    else:
        units = (elements[:, None] * 2 + np.arange(2)).reshape(-1)
    table = operand.flat_table()
    covered = []
    base = base_offsets(plan, operand.num_warps)
    for instruction, warp in itertools.product(plan.instructions, range(operand.num_warps)):
        address = (base[:, warp] ^ instruction.xor_offset) + instruction.add_offset
        assert not (address * bits // 8 % 16).any()
        got = ldmatrix(units, address * bits // 16, plan.matrices, plan.transposed)
        assert len(instruction.registers) == plan.matrices
        for matrix, registers in enumerate(instruction.registers):
            held = table[list(registers), :, warp]
            if bits == 8:
                expected = [held[0] * 100000 + held[1], held[2] * 100000 + held[3]]
            elif bits == 16:
                expected = [held[0], held[1]]
            else:
                expected = [held[0] * 2, held[0] * 2 + 1]
            assert (got[matrix] == np.stack(expected, axis=-1)).all()
            covered += registers if warp == 0 else ()
    assert sorted(covered) == list(range(operand.num_registers))


def test_ldmatrix_refuses_what_it_cannot_load():
    shared = shared_for_mma_operand((32, 32), (1, 0), 16)
    assert ldmatrix_plan(shared, default_blocked((32, 32), 4, vec=4), 16) is None
    narrow = LinearLayout.shared((16, 4), [(0, 1), (0, 2), (1, 0), (2, 0), (4, 0), (8, 0)])
    assert ldmatrix_plan(narrow, mma_accumulator((16, 4), (1, 1)), 16) is None
    scrambled = shared_swizzled((32, 32), (1, 0), 2, 1, 4)  # swizzle inside a 16-byte row
    assert ldmatrix_plan(scrambled, mma_operand((32, 32), 0, (1, 1), 16), 16) is None


def brute_conflicts(addresses, size):
    """Wavefronts of the worst group of lanes, straight from the byte addresses."""
    group = {1: 32, 2: 32, 4: 32, 8: 16, 16: 8}[size]
    worst = 1
    for start in range(0, 32, group):
        per_bank = {}
        for lane in range(start, start + group):
            for byte in range(addresses[lane], addresses[lane] + size):
                per_bank.setdefault(byte // 4 % 32, set()).add(byte // 128)
        worst = max(worst, *(len(rows) for rows in per_bank.values()))
    return worst


@given(st.data())
def test_bank_conflicts_of_every_group_and_warp(plain_layouts, data):
    (layout,) = data.draw(plain_layouts(1))
    bits = data.draw(st.sampled_from([8, 16, 32, 64]))
    vec, per_phase, phases = (1 << data.draw(st.integers(0, 3)) for _ in range(3))
    order = data.draw(st.permutations(range(layout.rank)))
    shared = shared_swizzled(layout.shape, order, vec, per_phase, phases)
    plan = shared_access_plan(shared, layout, bits)
    degree = bank_conflicts(shared, layout, plan.vec, bits)
    base = base_offsets(plan, layout.num_warps)
    for group in plan.groups[:4]:
        for warp in range(layout.num_warps):
            addresses = [int(a) * bits // 8 for a in base[:, warp] ^ group.offset]
            assert brute_conflicts(addresses, plan.vec * bits // 8) == degree
