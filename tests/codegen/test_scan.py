"""Inclusive scans, forward and reverse, of one and several operands, against numpy."""

import numpy as np
import pytest

from minitriton.ir.builder import i32_attr
from minitriton.ir.encoding import layout_of
from minitriton.ir.layouts import mma_accumulator
from minitriton.ir.mlir import ir
from minitriton.ir.reduction import plan_scan, scan_layout
from tests.codegen.test_reduce import NUMPY, add_region, binary
from tests.codegen.tile_kernel import (
    ALL_TARGETS,
    TileKernel,
    check_assembles,
    random_blocked,
    run,
    with_context,
)


def scan_op(kernel, values, axis, reverse, body):
    """mt.scan whose region is made by body(builder, earlier, later)."""
    attributes = {
        "axis": i32_attr(axis),
        "reverse": ir.BoolAttr.get(reverse),
        "mt.offset": i32_attr(0),
    }
    types = [value.type for value in values]
    op = kernel.builder.create("mt.scan", types, values, attributes, regions=1)
    add_region(kernel, op, [t.element_type for t in types], body)
    return list(op.results)


def affine(b, x, y):
    """Composition of x -> a x + c, which does not commute: (a1 a2, a2 c1 + c2)."""
    i32 = x[0].type
    slope = b.op("arith.muli", i32, (x[0], y[0]))
    moved = b.op("arith.muli", i32, (y[0], x[1]))
    return [slope, b.op("arith.addi", i32, (moved, y[1]))]


def reference_affine(slopes, offsets, axis, reverse):
    slopes, offsets = (np.moveaxis(v, axis, 0).astype(object) for v in (slopes, offsets))
    if reverse:
        slopes, offsets = slopes[::-1], offsets[::-1]
    out = [(slopes[0], offsets[0])]
    for a, c in zip(slopes[1:], offsets[1:], strict=True):
        out.append((out[-1][0] * a, a * out[-1][1] + c))
    results = [np.stack([o[i] for o in out]) for i in range(2)]
    if reverse:
        results = [r[::-1] for r in results]
    return [np.moveaxis(r & 0xFFFFFFFF, 0, axis).astype(np.uint32).view(np.int32) for r in results]


@pytest.mark.parametrize("num_warps", [1, 2, 4, 8])
@with_context
def test_random_sums(num_warps):
    rng = np.random.default_rng(num_warps)
    for case in range(8):
        shape = [(256,), (8, 64), (64, 16), (4, 8, 32)][case % 4]
        axis = int(rng.integers(len(shape)))
        layout = scan_layout(random_blocked(rng, shape, num_warps), axis)
        element = ["i32", "i64", "i8", "i16"][int(rng.integers(4))]
        dtype = NUMPY[element]
        kernel = TileKernel([element, element], num_warps)
        value = kernel.load(0, layout)
        kernel.store(1, scan_op(kernel, [value], axis, case >= 4, binary("arith.addi"))[0])
        x = rng.integers(-9, 9, shape).astype(dtype)
        result = np.zeros_like(x)
        plan = plan_scan(layout, axis, (dtype().itemsize,), case >= 4)
        run(kernel.ptx(), [x, result], num_warps, plan.scratch_bytes)
        ordered = np.flip(x, axis) if case >= 4 else x
        expected = np.cumsum(ordered, axis, dtype=dtype)
        expected = np.flip(expected, axis) if case >= 4 else expected
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("mma", [False, True])
@with_context
def test_two_operands_that_do_not_commute(reverse, axis, mma):
    rng = np.random.default_rng(axis)
    base = mma_accumulator((8, 64), (1, 4)) if mma else random_blocked(rng, (32, 32), 4)
    layout = scan_layout(base, axis)
    kernel = TileKernel(["i32"] * 4, 4)
    values = [kernel.load(0, layout), kernel.load(1, layout)]
    for argument, result in enumerate(scan_op(kernel, values, axis, reverse, affine), 2):
        kernel.store(argument, result)
    slopes, offsets = rng.integers(-3, 4, (2, *layout.shape)).astype(np.int32)
    arrays = [slopes, offsets, np.zeros_like(slopes), np.zeros_like(slopes)]
    run(kernel.ptx(), arrays, 4, plan_scan(layout, axis, (4, 4), reverse).scratch_bytes)
    expected = reference_affine(slopes, offsets, axis, reverse)
    np.testing.assert_array_equal(arrays[3], expected[1])
    np.testing.assert_array_equal(arrays[2], expected[0])


@pytest.mark.parametrize("arch", ALL_TARGETS)
@with_context
def test_assembles(arch):
    layout = scan_layout(random_blocked(np.random.default_rng(1), (16, 256), 4), 1)
    kernel = TileKernel(["f32", "f32"], 4, arch)
    value = kernel.load(0, layout)
    assert layout_of(value.type) == layout
    kernel.store(1, scan_op(kernel, [value], 1, False, binary("arith.addf"))[0])
    check_assembles(kernel.ptx(), arch)
