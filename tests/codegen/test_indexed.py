"""mt.gather from and to random layouts, and what its verifier refuses."""

import numpy as np
import pytest

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
