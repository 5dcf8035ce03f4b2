"""Reductions of every axis placement, type and combine region against numpy."""

import numpy as np
import pytest

from minitriton.codegen.emit import PREDICATES
from minitriton.ir.builder import i32_attr
from minitriton.ir.encoding import layout_of, tile_type
from minitriton.ir.layouts import blocked, mma_accumulator
from minitriton.ir.mlir import ir
from minitriton.ir.reduction import plan_reduction
from tests.codegen.tile_kernel import (
    ALL_TARGETS,
    TileKernel,
    check_assembles,
    random_blocked,
    run,
    with_context,
)

NUMPY = {
    "f16": np.float16, "f32": np.float32, "f64": np.float64,
    "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
}  # fmt: skip


def reduce_op(kernel, values, axis, body):
    """mt.reduce whose region is made by body(builder, a..., b...) -> results."""
    layout = layout_of(values[0].type)
    elements = [value.type.element_type for value in values]
    small = layout.slice(axis)
    types = [tile_type(e, small) if small.rank else e for e in elements]
    attributes = {"axis": i32_attr(axis), "mt.offset": i32_attr(0)}
    op = kernel.builder.create("mt.reduce", types, values, attributes, regions=1)
    add_region(kernel, op, elements, body)
    return list(op.results)


def add_region(kernel, op, elements, body):
    locs = [ir.Location.unknown()] * (2 * len(elements))
    block = op.regions[0].blocks.append(*elements, *elements, arg_locs=locs)
    with kernel.builder.at(ir.InsertionPoint(block)):
        arguments = list(block.arguments)
        results = body(kernel.builder, arguments[: len(elements)], arguments[len(elements) :])
        kernel.builder.create("mt.yield", [], results)


def binary(name):
    return lambda b, x, y: [b.op(name, x[0].type, (x[0], y[0]))]


def argmax(b, x, y):
    """(value, index): the larger value, at equal values the smaller index."""
    i1, i64 = ir.IntegerType.get_signless(1), ir.IntegerType.get_signless(64)
    greater = b.op("arith.cmpf", i1, (x[0], y[0]), {"predicate": ir.IntegerAttr.get(i64, 2)})
    equal = b.op("arith.cmpf", i1, (x[0], y[0]), {"predicate": ir.IntegerAttr.get(i64, 1)})
    slt = {"predicate": ir.IntegerAttr.get(i64, PREDICATES.index("slt"))}
    first = b.op("arith.cmpi", i1, (x[1], y[1]), slt)
    take = b.op("arith.ori", i1, (greater, b.op("arith.andi", i1, (equal, first))))
    return [b.op("arith.select", u.type, (take, u, v)) for u, v in zip(x, y, strict=True)]


def reduce_once(layout, axis, element, name, num_warps, target="sm_80", seed=0):
    """(input, result, PTX) of a reduction by one arith op."""
    kernel = TileKernel([element, element], num_warps, target)
    kernel.store(1, reduce_op(kernel, [kernel.load(0, layout)], axis, binary(name))[0])
    dtype, rng = NUMPY[element], np.random.default_rng(seed)
    if np.issubdtype(dtype, np.floating):
        x = rng.standard_normal(layout.shape).astype(dtype)
    else:
        x = rng.integers(-100, 100, layout.shape).astype(dtype)
    result = np.zeros(layout.slice(axis).shape or (1,), dtype)
    ptx = kernel.ptx()
    plan = plan_reduction(layout, axis, (dtype().itemsize,))
    run(ptx, [x, result], num_warps, plan.scratch_bytes)
    return x, result, ptx


FOLDS = {
    "arith.addi": np.add, "arith.maxsi": np.maximum, "arith.minsi": np.minimum,
    "arith.andi": np.bitwise_and, "arith.xori": np.bitwise_xor, "arith.ori": np.bitwise_or,
    "arith.addf": np.add, "arith.maxnumf": np.maximum,
}  # fmt: skip


@pytest.mark.parametrize("num_warps", [1, 2, 4, 8])
@with_context
def test_random(num_warps):
    rng = np.random.default_rng(num_warps)
    for case in range(10):
        shape = [(256,), (8, 64), (64, 16), (4, 8, 32)][case % 4]
        layout = random_blocked(rng, shape, num_warps)
        axis = int(rng.integers(len(shape)))
        element = list(NUMPY)[(case + num_warps) % 7]
        names = [
            n for n in FOLDS if n.endswith("f") == element.startswith("f") and n != "arith.addf"
        ]
        name = names[case % len(names)]
        x, result, _ = reduce_once(layout, axis, element, name, num_warps, seed=case)
        expected = FOLDS[name].reduce(x, axis, dtype=x.dtype)
        np.testing.assert_array_equal(result.reshape(expected.shape), expected)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", [(64, 64), (8, 32), (16, 4)], ids=str)
@with_context
def test_accumulator_sum(axis, shape):
    """mma layouts, also tiles smaller than the instruction, whose registers repeat."""
    layout = mma_accumulator(shape, (2, 2))
    x, result, _ = reduce_once(layout, axis, "f32", "arith.addf", 4)
    np.testing.assert_allclose(result, x.astype(np.float64).sum(axis), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_warps", [4, 16, 32])
@with_context
def test_argmax_of_two_operands(num_warps):
    columns = 32 * num_warps
    layout = blocked((8, columns), (1, 1), (1, 32), (1, num_warps), (1, 0))
    if num_warps == 4:
        layout = random_blocked(np.random.default_rng(3), (8, columns), num_warps)
    kernel = TileKernel(["f32", "i32", "f32", "i32"], num_warps)
    values = [kernel.load(0, layout), kernel.load(1, layout)]
    for argument, result in enumerate(reduce_op(kernel, values, 1, argmax), 2):
        kernel.store(argument, result)
    x = np.random.default_rng(0).integers(0, 50, (8, columns)).astype(np.float32)
    index = np.broadcast_to(np.arange(columns, dtype=np.int32), (8, columns)).copy()
    arrays = [x, index, np.zeros(8, np.float32), np.zeros(8, np.int32)]
    plan = plan_reduction(layout, 1, (4, 4))
    run(kernel.ptx(), arrays, num_warps, plan.scratch_bytes)
    np.testing.assert_array_equal(arrays[2], x.max(1))
    np.testing.assert_array_equal(arrays[3], x.argmax(1))


@with_context
def test_communication_only_where_needed():
    in_thread = blocked((128, 4), (1, 4), (32, 1), (4, 1), (1, 0))
    _, _, ptx = reduce_once(in_thread, 1, "f32", "arith.addf", 4)
    assert "shfl" not in ptx and "bar.sync" not in ptx and "shared" not in ptx.split("{")[1]
    in_warp = blocked((4, 128), (1, 4), (1, 32), (4, 1), (1, 0))
    _, _, ptx = reduce_once(in_warp, 1, "f32", "arith.addf", 4)
    assert ptx.count("shfl.sync.bfly") == 5 and "st.shared" not in ptx
    _, _, ptx = reduce_once(in_warp, 1, "i32", "arith.maxsi", 4)
    assert "redux.sync.max.s32" in ptx and "shfl" not in ptx
    across = blocked((1024,), (4,), (32,), (8,), (0,))
    _, _, ptx = reduce_once(across, 0, "f32", "arith.addf", 8)
    assert ptx.count("bar") - ptx.count("bar.warp") <= 2


@with_context
def test_partials_are_written_once():
    layout = blocked((4, 256), (1, 4), (1, 32), (1, 8), (1, 0))
    kernel = TileKernel(["f32", "f32"], 8)
    value = kernel.load(0, layout)
    kernel.store(1, reduce_op(kernel, [value], 1, binary("arith.addf"))[0])
    x, y = np.ones((4, 256), np.float32), np.zeros(4, np.float32)
    plan = plan_reduction(layout, 1, (4,))
    report = run(kernel.ptx(), [x, y], 8, plan.scratch_bytes)
    np.testing.assert_array_equal(y, 256)
    assert report.bytes["store_shared"] == 4 * plan.cross_warp.count * 4


@pytest.mark.parametrize("arch", ALL_TARGETS)
@with_context
def test_assembles(arch):
    layout = blocked((8, 512), (1, 4), (1, 32), (2, 4), (1, 0))
    kernel = TileKernel(["i32", "i32"], 8, arch)
    value = kernel.load(0, layout)
    kernel.store(1, reduce_op(kernel, [value], 1, binary("arith.addi"))[0])
    check_assembles(kernel.ptx(), arch)
