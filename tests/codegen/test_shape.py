"""Shape ops against numpy; none of them may emit a shuffle or touch shared memory."""

import numpy as np
import pytest

from minitriton.codegen.emit import attribute
from minitriton.ir.builder import i32_attr
from minitriton.ir.encoding import layout_of, tile_type
from minitriton.ir.layouts import blocked, default_blocked, mma_accumulator
from minitriton.ir.mlir import ir
from tests.codegen.tile_kernel import TileKernel, random_blocked, run, with_context


def evaluate(kernel, inputs, shapes, num_warps):
    """Results of `kernel` whose arguments are the inputs followed by outputs of `shapes`."""
    outputs = [np.zeros(shape, inputs[0].dtype) for shape in shapes]
    ptx = kernel.ptx()
    assert "shfl" not in ptx and ".shared." not in ptx
    run(ptx, [*inputs, *outputs], num_warps)
    return outputs


def unary(name, source, result_layout, attributes, num_warps, seed=0):
    """(input, output) arrays of one op from layout `source` to `result_layout`."""
    kernel = TileKernel(["f32", "f32"], num_warps)
    type_ = tile_type(ir.F32Type.get(), result_layout)
    kernel.store(1, kernel.builder.op(name, type_, (kernel.load(0, source),), attributes))
    x = np.random.default_rng(seed).standard_normal(source.shape).astype(np.float32)
    return x, evaluate(kernel, [x], [result_layout.shape], num_warps)[0]


@pytest.mark.parametrize("seed", range(4))
@with_context
def test_one_operand(seed):
    rng = np.random.default_rng(seed)
    num_warps = [1, 2, 4, 4][seed]
    layout = random_blocked(rng, (16, 32), num_warps)
    order = {"order": attribute("array<i32: 1, 0>")}
    x, y = unary("mt.trans", layout, layout.transpose((1, 0)), order, num_warps)
    np.testing.assert_array_equal(y, x.T)
    x, y = unary("mt.reshape", layout, layout.reshape((8, 4, 16)), None, num_warps)
    np.testing.assert_array_equal(y, x.reshape(8, 4, 16))
    axis = int(rng.integers(3))
    place = {"axis": i32_attr(axis)}
    x, y = unary("mt.expand_dims", layout, layout.expand_dims(axis), place, num_warps)
    np.testing.assert_array_equal(y, np.expand_dims(x, axis))


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("mma", [False, True])
@with_context
def test_broadcast(dims, mma):
    rng = np.random.default_rng(len(dims))
    wide = mma_accumulator((32, 16), (2, 2)) if mma else random_blocked(rng, (32, 16), 4)
    source = wide.broadcast_source(dims)
    x, y = unary("mt.broadcast", source, wide, None, 4)
    np.testing.assert_array_equal(y, np.broadcast_to(x, (32, 16)))


@with_context
def test_broadcast_to_the_same_shape():
    layout = default_blocked((8, 16), 2)
    x, y = unary("mt.broadcast", layout, layout, None, 2)
    np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize("seed", range(3))
@with_context
def test_join_split_cat(seed):
    rng = np.random.default_rng(seed)
    layout = random_blocked(rng, (16, 8), 2)
    f32 = ir.F32Type.get()
    kernel = TileKernel(["f32"] * 6, 2)
    b = kernel.builder
    lhs, rhs = kernel.load(0, layout), kernel.load(1, layout)
    joined = b.op("mt.join", tile_type(f32, layout.join()), (lhs, rhs))
    kernel.store(2, joined)
    halves = b.create("mt.split", [tile_type(f32, layout.join().split())] * 2, (joined,))
    kernel.store(3, halves.results[0])
    kernel.store(4, halves.results[1])
    axis = seed % 2
    cat = tile_type(f32, layout.cat(axis))
    kernel.store(5, b.op("mt.cat", cat, (lhs, rhs), {"axis": i32_attr(axis)}))
    x, y = rng.standard_normal((2, 16, 8)).astype(np.float32)
    shapes = [(16, 8, 2), (16, 8), (16, 8), layout_of(cat).shape]
    out = evaluate(kernel, [x, y], shapes, 2)
    np.testing.assert_array_equal(out[0], np.stack([x, y], -1))
    np.testing.assert_array_equal(out[1], x)
    np.testing.assert_array_equal(out[2], y)
    np.testing.assert_array_equal(out[3], np.concatenate([x, y], axis))


@with_context
def test_split_by_a_high_register_bit():
    layout = blocked((32, 2), (1, 1), (32, 1), (1, 1), (0, 1))
    kernel = TileKernel(["f32"] * 3, 1)
    half = tile_type(ir.F32Type.get(), layout.split())
    halves = kernel.builder.create("mt.split", [half, half], (kernel.load(0, layout),))
    kernel.store(1, halves.results[0])
    kernel.store(2, halves.results[1])
    x = np.random.default_rng(0).standard_normal((32, 2)).astype(np.float32)
    first, second = evaluate(kernel, [x], [(32,), (32,)], 1)
    np.testing.assert_array_equal(np.stack([first, second], -1), x)


@pytest.mark.parametrize(
    ("shape", "axis", "block"), [((48, 8), 0, 16), ((96, 2), 0, 32), ((176,), 0, 16)]
)
@with_context
def test_flip_blocks(shape, axis, block):
    """Blocks last to first, each as it is."""
    layout = default_blocked(shape, 1)
    x, y = unary("mt.flip_blocks", layout, layout, {"axis": i32_attr(axis)}, 1)
    parts = np.split(x, shape[axis] // block, axis)
    np.testing.assert_array_equal(y, np.concatenate(parts[::-1], axis))


@with_context
def test_flip_blocks_verifies_its_type():
    kernel = TileKernel(["f32"], 1)
    x = kernel.load(0, default_blocked((48,), 1))
    other = tile_type(ir.F32Type.get(), default_blocked((96,), 1))
    with pytest.raises(ir.MLIRError, match="cannot become"):
        kernel.builder.op("mt.flip_blocks", other, (x,), {"axis": i32_attr(0)}).owner.verify()


@with_context
def test_unsplat_verifies_its_element():
    kernel = TileKernel(["f32"], 1)
    x = kernel.load(0, default_blocked((32,), 1))
    i32 = ir.IntegerType.get_signless(32)
    with pytest.raises(ir.MLIRError, match="element of"):
        kernel.builder.op("mt.unsplat", i32, (x,)).owner.verify()


@pytest.mark.parametrize("start", [0, 7])
@with_context
def test_make_range_and_splat(start):
    layout = random_blocked(np.random.default_rng(start), (256,), 2)
    kernel = TileKernel(["i32", "i32", "i32"], 2)
    i32 = ir.IntegerType.get_signless(32)
    attributes = {"start": i32_attr(start), "end": i32_attr(start + 256)}
    kernel.store(1, kernel.builder.op("mt.make_range", tile_type(i32, layout), (), attributes))
    scalar = kernel.builder.op("mt.load", i32, (kernel.block.arguments[0],))
    b = kernel.builder
    again = b.op("mt.unsplat", i32, (b.op("mt.splat", tile_type(i32, layout), (scalar,)),))
    kernel.store(2, b.op("mt.splat", tile_type(i32, layout), (again,)))
    out = evaluate(kernel, [np.array([41], np.int32)], [(256,), (256,)], 2)
    np.testing.assert_array_equal(out[0], np.arange(start, start + 256))
    assert (out[1] == 41).all()
