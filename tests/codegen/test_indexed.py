"""mt.gather and mt.histogram of random layouts, and what their verifiers refuse."""

import numpy as np
import pytest

from minitriton.codegen.emit import attribute
from minitriton.ir.builder import i32_attr
from minitriton.ir.encoding import tile_type
from minitriton.ir.layouts import default_blocked
from minitriton.ir.mlir import ir
from tests.codegen.tile_kernel import TileKernel, random_blocked, run, with_context


@pytest.mark.parametrize("seed", range(6))
@with_context
def test_gather(seed):
    rng = np.random.default_rng(seed)
    warps, axis = [1, 2, 4][seed % 3], seed % 2
    shape, wanted = (16, 32), ((8, 32), (16, 64))[axis]
    source, target = (random_blocked(rng, s, warps) for s in (shape, wanted))
    kernel = TileKernel(["f32", "i32", "f32"], warps)
    operands = (kernel.load(0, source), kernel.load(1, target))
    type_ = tile_type(ir.F32Type.get(), target)
    attributes = {"axis": i32_attr(axis), "mt.offset": i32_attr(0)}
    kernel.store(2, kernel.builder.op("mt.gather", type_, operands, attributes))
    x = rng.standard_normal(shape).astype(np.float32)
    index = rng.integers(0, shape[axis], wanted).astype(np.int32)
    out = np.zeros(wanted, np.float32)
    run(kernel.ptx(), [x, index, out], warps, shared_bytes=x.nbytes)
    np.testing.assert_array_equal(out, np.take_along_axis(x, index, axis))


WRONG = {
    "another dimension": ("f32", (16, 32), "i32", (8, 16), 0),
    "is not of i32": ("f32", (16, 32), "i64", (16, 8), 1),
    "no tiles of one rank": ("f32", (16, 32), "i32", (16,), 0),
}


@pytest.mark.parametrize("problem", WRONG)
@with_context
def test_gather_verifies_its_types(problem):
    element, shape, number, wanted, axis = WRONG[problem]
    kernel = TileKernel([element, number], 1)
    layouts = [default_blocked(s, 1) for s in (shape, wanted)]
    operands = [kernel.load(i, layout) for i, layout in enumerate(layouts)]
    type_ = tile_type(ir.Type.parse(element), layouts[1])
    with pytest.raises(ir.MLIRError, match=problem):
        made = kernel.builder.op("mt.gather", type_, operands, {"axis": i32_attr(axis)})
        made.owner.verify()


@pytest.mark.parametrize("seed", range(3))
@with_context
def test_histogram(seed):
    """Elements that several threads hold, as 64 of 2 warps with 4 a thread, count once."""
    rng = np.random.default_rng(seed)
    warps, size, bins = [1, 2, 4][seed], [512, 64, 32][seed], [8, 256, 32][seed]
    source = random_blocked(rng, (size,), warps)
    target = random_blocked(rng, (bins,), warps)
    kernel = TileKernel(["i32", "i32", "i32"], warps)
    b, i32 = kernel.builder, ir.IntegerType.get_signless(32)
    value, limit = kernel.load(0, source), kernel.load(1, source)
    mask_type = tile_type(ir.IntegerType.get_signless(1), source)
    mask = b.op("arith.cmpi", mask_type, (value, limit), {"predicate": attribute("2 : i64")})
    attributes = {"mt.offset": i32_attr(0)}
    kernel.store(2, b.op("mt.histogram", tile_type(i32, target), (value, mask), attributes))
    x = rng.integers(0, bins, size).astype(np.int32)
    most = rng.integers(0, bins, size).astype(np.int32)
    out = np.full(bins, -1, np.int32)
    run(kernel.ptx(), [x, most, out], warps, shared_bytes=out.nbytes)
    np.testing.assert_array_equal(out, np.bincount(x[x < most], minlength=bins))


@with_context
def test_histogram_verifies_its_types():
    kernel = TileKernel(["i32"], 1)
    layout = default_blocked((32,), 1)
    value = kernel.load(0, layout)
    type_ = tile_type(ir.IntegerType.get_signless(32), default_blocked((16,), 1))
    with pytest.raises(ir.MLIRError, match="i32 and i1"):
        kernel.builder.op("mt.histogram", type_, (value, value)).owner.verify()
