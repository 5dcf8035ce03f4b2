"""convert_layout between random layouts, by every kind of plan, against the identity."""

import collections
import re

import numpy as np
import pytest

from minitriton.ir.conversion import NoMove, RegisterMove, SharedRoundTrip, plan_conversion
from minitriton.ir.encoding import tile_type
from minitriton.ir.layouts import blocked, mma_accumulator, mma_operand
from minitriton.ir.linear_layout import LinearLayout
from minitriton.ir.mlir import ir
from minitriton.ir.warp_shuffle import WarpShuffle
from tests.codegen.tile_kernel import (
    ALL_TARGETS,
    TileKernel,
    check_assembles,
    random_blocked,
    run,
    with_context,
)

ELEMENTS = {"i8": np.uint8, "f16": np.uint16, "bf16": np.uint16, "f32": np.uint32, "f64": np.uint64}


def data(rng, element, count):
    # no NaNs: moving one through a register may quieten it
    high = {1: 1 << 8, 2: 0x7C00, 4: 0x7F800000, 8: 0x7FF0 << 48}
    dtype = ELEMENTS[element]
    return rng.integers(0, high[np.dtype(dtype).itemsize], count, dtype=dtype)


def convert(src, dst, element, num_warps, target="sm_80", rng=None):
    """Runs load(src) -> convert -> store(dst); returns (plan, PTX) after checking the values."""
    kernel = TileKernel([element, element], num_warps, target)
    bits = np.dtype(ELEMENTS[element]).itemsize * 8
    plan = plan_conversion(src, dst, bits)
    kernel.store(1, kernel.convert(kernel.load(0, src), dst))
    ptx = kernel.ptx()
    values = data(rng or np.random.default_rng(0), element, 1 << src.num_bits)
    result = np.zeros_like(values)
    run(ptx, [values, result], num_warps, getattr(plan, "bytes", 0))
    np.testing.assert_array_equal(result, values)
    return plan, ptx


@pytest.mark.parametrize("num_warps", [1, 2, 4])
@with_context
def test_random(num_warps):
    rng = np.random.default_rng(num_warps)
    seen = collections.Counter()
    for case in range(14):
        shape = [(64,), (8, 4), (32, 32), (64, 16), (4, 8, 16), (128, 1)][case % 6]
        src, dst = (random_blocked(rng, shape, num_warps) for _ in range(2))
        element = list(ELEMENTS)[case % 5]
        plan, _ = convert(src, dst, element, num_warps, rng=rng)
        seen[type(plan)] += 1
    assert seen[SharedRoundTrip] or num_warps == 1


@pytest.mark.parametrize("element", ["f16", "f32", "i8"])
@with_context
def test_accumulator_to_operand(element):
    bits = {"f16": 16, "f32": 32, "i8": 8}[element]
    src = mma_accumulator((64, 64), (4, 1))
    plan, ptx = convert(src, mma_operand((64, 64), 0, (4, 1), bits), element, 4)
    if element == "f16":  # the fragments of flash attention's P: free
        assert isinstance(plan, (NoMove, RegisterMove)) and "shfl" not in ptx


@with_context
def test_kinds_of_plan():
    rows = blocked((32, 32), (1, 4), (4, 8), (1, 1), (1, 0))
    columns = blocked((32, 32), (4, 1), (8, 4), (1, 1), (0, 1))
    transposed = blocked((32, 32), (4, 1), (8, 4), (1, 1), (1, 0))
    kinds = {type(convert(rows, other, "f32", 1)[0]) for other in (rows, columns, transposed)}
    assert NoMove in kinds and (WarpShuffle in kinds or SharedRoundTrip in kinds)


@with_context
def test_replicated_source_writes_once():
    src = blocked((16, 4), (1, 1), (8, 4), (4, 1), (1, 0))  # 4 warps on 2 warps' worth
    dst = blocked((16, 4), (1, 1), (2, 16), (4, 1), (0, 1))
    kernel = TileKernel(["f32", "f32"], 4)
    kernel.store(1, kernel.convert(kernel.load(0, src), dst))
    x = np.random.default_rng(0).standard_normal((16, 4)).astype(np.float32)
    y = np.zeros_like(x)
    report = run(kernel.ptx(), [x, y], 4, 256)
    np.testing.assert_array_equal(y, x)
    assert report.bytes["store_shared"] == x.nbytes


@pytest.mark.parametrize("element", ["f16", "f32"])
@with_context
def test_registers_that_repeat(element):
    """Fragments of tiles smaller than the instruction, as source and as result."""
    small = mma_accumulator((8, 64), (1, 2))
    assert small.free_bits("register")
    rows = blocked((8, 64), (1, 4), (2, 16), (2, 1), (1, 0))
    columns = blocked((8, 64), (4, 1), (2, 16), (1, 2), (0, 1))
    for other in (rows, columns):
        convert(small, other, element, 2)
        convert(other, small, element, 2)


@with_context
def test_large_tile_in_chunks():
    src = blocked((128, 128), (1, 8), (4, 8), (4, 1), (1, 0))
    dst = blocked((128, 128), (8, 1), (8, 4), (1, 4), (0, 1))
    plan, ptx = convert(src, dst, "f32", 4)
    assert isinstance(plan, SharedRoundTrip) and len(plan.chunks) > 1
    assert ptx.count("bar.sync") + ptx.count("barrier.sync") == 2 * len(plan.chunks) - 1


@with_context
def test_predicates_and_pointers():
    src = blocked((64, 8), (1, 1), (4, 8), (4, 1), (1, 0))
    dst = blocked((64, 8), (2, 1), (32, 1), (1, 4), (0, 1))
    kernel = TileKernel(["i8", "i8", "f32", "f32"], 4)
    builder = kernel.builder
    flag = builder.op(
        "arith.trunci", tile_type(ir.IntegerType.get_signless(1), src), (kernel.load(0, src),)
    )
    flag = kernel.convert(flag, dst)
    kernel.store(
        1, builder.op("arith.extui", tile_type(ir.IntegerType.get_signless(8), dst), (flag,))
    )
    kernel.barrier()
    pointers = kernel.convert(kernel.pointers(2, src), dst)
    value = builder.op("mt.load", tile_type(ir.F32Type.get(), dst), (pointers,))
    kernel.store(3, value)
    rng = np.random.default_rng(5)
    flags = rng.integers(0, 256, 512).astype(np.uint8)
    values = rng.standard_normal(512).astype(np.float32)
    arrays = [flags, np.zeros_like(flags), values, np.zeros_like(values)]
    run(kernel.ptx(), arrays, 4, 8192)
    np.testing.assert_array_equal(arrays[1], flags & 1)
    np.testing.assert_array_equal(arrays[3], values)


@pytest.mark.parametrize("arch", ALL_TARGETS)
@with_context
def test_assembles(arch):
    src = mma_accumulator((64, 64), (2, 2))
    dst = blocked((64, 64), (1, 8), (4, 8), (4, 1), (1, 0))
    kernel = TileKernel(["f16", "f16"], 4, arch)
    kernel.store(1, kernel.convert(kernel.load(0, src), dst))
    check_assembles(kernel.ptx(), arch)


def vector(register, lane, warp=()):
    bases = {"register": register, "lane": lane, "warp": list(warp)}
    return LinearLayout.from_flat((64,), bases)


@pytest.mark.parametrize("element", ["f16", "f32", "f64"])
@with_context
def test_rows_for_fragments_need_no_registers_for_lanes(element):
    """Each lane keeps its place in a group of four: the segment mask of the shuffle says so."""
    spread = vector([1], [2, 4, 8, 16, 32], [0, 0])
    columns = vector([1, 8, 16, 32], [2, 4, 0, 0, 0], [0, 0])
    plan, ptx = convert(spread, columns, element, 4)
    assert isinstance(plan, WarpShuffle)
    found = re.findall(r"shfl\.sync\.idx\.b32\s+%r\d+, %r\d+, (\w+), (\w+), -1", ptx)
    assert {int(lane) for lane, _ in found} == set(range(0, 32, 4))
    assert {int(bound) for _, bound in found} == {3 << 8 | 31}


@with_context
def test_lanes_that_are_calculated():
    """The source lane has bits of the lane in other places."""
    plan, ptx = convert(vector([1], [2, 4, 8, 16, 32]), vector([1, 8], [16, 32, 2, 4, 0]), "f32", 1)
    assert isinstance(plan, WarpShuffle)
    assert re.search(r"shfl\.sync\.idx\.b32\s+%r\d+, %r\d+, %r\d+, 31, -1", ptx)
