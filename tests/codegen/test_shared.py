"""Shared buffers: random swizzles, operands by ldmatrix, slots and transposed views."""

import numpy as np
import pytest

from minitriton.codegen.emit import attribute
from minitriton.ir.builder import i32_attr
from minitriton.ir.encoding import layout_of, tile_type
from minitriton.ir.layouts import (
    blocked,
    mma_accumulator,
    mma_operand,
    shared_for_mma_operand,
    shared_swizzled,
    shared_tma,
)
from minitriton.ir.mlir import ir
from tests.codegen.tile_kernel import (
    ALL_TARGETS,
    TileKernel,
    check_assembles,
    mem_type,
    random_blocked,
    run,
    with_context,
)

NUMPY = {"i8": np.uint8, "f16": np.float16, "bf16": np.uint16, "f32": np.float32, "f64": np.float64}
BITS = {"i8": 8, "f16": 16, "bf16": 16, "f32": 32, "f64": 64}


def random_data(rng, element, shape):
    return rng.integers(0, 100, shape).astype(NUMPY[element])


def alloc(kernel, element, shared, slots=None, value=None, offset=0):
    type_ = mem_type(ir.Type.parse(element), shared, slots)
    operands = () if value is None else (value,)
    return kernel.builder.op("mt.local_alloc", type_, operands, {"mt.offset": i32_attr(offset)})


def local_load(kernel, element, buffer, layout):
    return kernel.builder.op("mt.local_load", tile_type(ir.Type.parse(element), layout), (buffer,))


def round_trip(element, src, shared, dst, num_warps, target="sm_80"):
    """global -> registers `src` -> shared -> registers `dst` -> global; the PTX.

    Every element is written to shared memory once.
    """
    kernel = TileKernel([element, element], num_warps, target)
    buffer = alloc(kernel, element, shared, None, kernel.load(0, src))
    kernel.barrier()
    kernel.store(1, local_load(kernel, element, buffer, dst))
    x = random_data(np.random.default_rng(0), element, src.shape)
    y = np.zeros_like(x)
    ptx = kernel.ptx()
    report = run(ptx, [x, y], num_warps, x.nbytes)
    np.testing.assert_array_equal(y, x)
    assert report.bytes["store_shared"] == x.nbytes
    return ptx


@pytest.mark.parametrize("element", list(NUMPY))
@pytest.mark.parametrize("num_warps", [1, 4])
@with_context
def test_random_layouts(element, num_warps):
    rng = np.random.default_rng(num_warps)
    for _ in range(4):
        shape = (32, 64)
        order = [(0, 1), (1, 0)][int(rng.integers(2))]
        vec, per_phase, max_phase = (int(2 ** rng.integers(4)) for _ in range(3))
        shared = shared_swizzled(shape, order, vec, per_phase, max_phase)
        src, dst = (random_blocked(rng, shape, num_warps) for _ in range(2))
        round_trip(element, src, shared, dst, num_warps)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("order", [(1, 0), (0, 1)], ids=str)
@pytest.mark.parametrize("op_index", [0, 1])
@pytest.mark.parametrize("element", ["f16", "f32", "i8"])
@with_context
def test_mma_operands(element, op_index, order, target):
    shape, bits = (64, 64), BITS[element]
    shared = shared_for_mma_operand(shape, order, bits, op_index)
    vec = 128 // bits
    threads = (32 // (64 // vec), 64 // vec)
    size, lanes = ((1, vec), threads) if order == (1, 0) else ((vec, 1), threads[::-1])
    src = blocked(shape, size, lanes, (4, 1), order)
    dst = mma_operand(shape, op_index, (2, 2), bits)
    ptx = round_trip(element, src, shared, dst, 4, target)
    k_fastest = (order[0] == 1) == (op_index == 0)
    assert ("ldmatrix" in ptx) == (k_fastest or element == "f16")
    assert ("ldmatrix.sync.aligned.m8n8.x4.trans" in ptx) == (not k_fastest and element == "f16")


@with_context
def test_fragments_stored_by_stmatrix():
    shape = (64, 64)
    shared = shared_for_mma_operand(shape, (1, 0), 16)
    fragment = mma_operand(shape, 0, (4, 1), 16)
    dst = blocked(shape, (1, 8), (4, 8), (4, 1), (1, 0))
    assert "stmatrix" in round_trip("f16", fragment, shared, dst, 4, "sm_90a")
    assert "stmatrix" not in round_trip("f16", fragment, shared, dst, 4, "sm_80")


@pytest.mark.parametrize("shared", [shared_tma((64, 64), (1, 0), 16)], ids=["tma"])
@with_context
def test_tma_layout(shared):
    src = blocked((64, 64), (1, 8), (4, 8), (4, 1), (1, 0))
    ptx = round_trip("f16", src, shared, mma_operand((64, 64), 0, (4, 1), 16), 4)
    assert "ldmatrix" in ptx


@with_context
def test_replicated_tile_is_written_once():
    src = blocked((16, 4), (1, 1), (8, 4), (4, 1), (1, 0))
    shared = shared_swizzled((16, 4), (1, 0), 1, 1, 1)
    round_trip("f32", src, shared, src, 4)


@with_context
def test_registers_that_repeat():
    small = mma_accumulator((8, 32), (1, 2))
    shared = shared_swizzled((8, 32), (1, 0), 4, 1, 2)
    round_trip("f32", small, shared, small, 2)


@pytest.mark.parametrize("slots", [2, 3])
@with_context
def test_slots(slots):
    layout = blocked((32, 32), (1, 4), (4, 8), (4, 1), (1, 0))
    shared = shared_swizzled((32, 32), (1, 0), 4, 1, 8)
    kernel = TileKernel(["f32"] * slots + ["i32", "f32"], 4)
    b = kernel.builder
    buffer = alloc(kernel, "f32", shared, slots, offset=256)
    slot_type, i32 = mem_type(ir.F32Type.get(), shared), ir.IntegerType.get_signless(32)
    for slot in range(slots):
        place = b.op("mt.mem_index", slot_type, (buffer, b.constant(i32, slot)))
        b.create("mt.local_store", [], [kernel.load(slot, layout), place])
    kernel.barrier()
    index = b.op("mt.load", i32, (kernel.block.arguments[slots],))
    place = b.op("mt.mem_index", slot_type, (buffer, index))
    kernel.store(slots + 1, local_load(kernel, "f32", place, layout.transpose((1, 0))))
    ptx = kernel.ptx()
    rng = np.random.default_rng(slots)
    tiles = [rng.standard_normal((32, 32)).astype(np.float32) for _ in range(slots)]
    for slot in range(slots):
        result = np.zeros((32, 32), np.float32)
        run(ptx, [*tiles, np.array([slot], np.int32), result], 4, 256 + slots * 4096)
        np.testing.assert_array_equal(result, tiles[slot])


@with_context
def test_transposed_view():
    layout = blocked((32, 64), (1, 8), (4, 8), (4, 1), (1, 0))
    shared = shared_for_mma_operand((32, 64), (1, 0), 16)
    kernel = TileKernel(["f16", "f16"], 4)
    buffer = alloc(kernel, "f16", shared, None, kernel.load(0, layout))
    kernel.barrier()
    view_type = mem_type(ir.F16Type.get(), shared.transpose((1, 0)))
    order = {"order": attribute("array<i32: 1, 0>")}
    view = kernel.builder.op("mt.mem_trans", view_type, (buffer,), order)
    operand = mma_operand((64, 32), 0, (2, 2), 16)
    kernel.store(1, local_load(kernel, "f16", view, operand))
    x = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float16)
    y = np.zeros((64, 32), np.float16)
    ptx = kernel.ptx()
    run(ptx, [x, y], 4, x.nbytes)
    np.testing.assert_array_equal(y, x.T)
    assert "x4.trans" in ptx


@pytest.mark.parametrize("arch", ALL_TARGETS)
@with_context
def test_assembles(arch):
    shared = shared_for_mma_operand((64, 64), (1, 0), 16)
    kernel = TileKernel(["f16", "f16"], 4, arch)
    value = kernel.load(0, mma_operand((64, 64), 0, (4, 1), 16))
    buffer = alloc(kernel, "f16", shared, None, value)
    kernel.barrier()
    operand = local_load(kernel, "f16", buffer, mma_operand((64, 64), 1, (4, 1), 16))
    kernel.store(1, operand)
    assert layout_of(operand.type).num_registers == 128
    check_assembles(kernel.ptx(), arch)
