"""Tiles from registers through a swizzled buffer to memory by TMA, in pieces and over edges."""

import json

import numpy as np
import pytest

from minitriton.ir.builder import i32_attr
from minitriton.ir.encoding import tile_type
from minitriton.ir.layouts import blocked, mma_accumulator, shared_tma
from minitriton.ir.mlir import ir
from minitriton.ir.register_maps import narrowed
from minitriton.runtime.emulator import Emulator, SharedRace, TensorMap
from minitriton.runtime.emulator.memory import Allocation
from tests.codegen.tile_kernel import TileKernel, check_assembles, mem_type, with_context

WARPS = 4


def storing_kernel(
    source, order, box, start, width=None, span=128, target="sm_90a", fence=True, waits=True
):
    """Loads argument 0 (f16) in layout `source`, stores it by TMA at (row, column) `start`; with
    `width` in pieces of so many columns through two slots."""
    kernel = TileKernel(["f16", "f16"], WARPS, target)
    b, f16, i32 = kernel.builder, ir.F16Type.get(), ir.IntegerType.get_signless(32)
    spec = {"box": box, "element_bytes": 2}
    kernel.module.operation.attributes["mt.tensor_maps"] = ir.StringAttr.get(json.dumps([spec]))
    kernel.module.operation.attributes["mt.shared_alignment"] = i32_attr(1024)
    tile = kernel.load(0, source)
    part = source if width is None else narrowed(source, 1, width)
    slot = shared_tma(part.shape, order, 16, span)
    count, slots = source.shape[1] // part.shape[1], 1 if width is None else 2
    buffer = b.op("mt.local_alloc", mem_type(f16, slot, slots), (), {"mt.offset": i32_attr(0)})
    attributes = {
        "map": i32_attr(0),
        "dims": ir.DenseI32ArrayAttr.get([order.index(0), order.index(1)]),
    }
    for number in range(count):
        if number >= slots and waits:
            one = {"pending": i32_attr(slots - 1), "read": ir.UnitAttr.get()}
            b.create("mt.tma_store_wait", [], [], one)
            kernel.barrier()
        value = tile
        if width is not None:
            at = {"axis": i32_attr(1), "start": i32_attr(number * width)}
            value = b.op("mt.narrow", tile_type(f16, part), (tile,), at)
        place = b.op("mt.mem_index", mem_type(f16, slot), (buffer, b.constant(i32, number % slots)))
        b.create("mt.local_store", [], [value, place])
        if fence:
            b.create("mt.proxy_fence", [])
        kernel.barrier()
        corner = (start[0], start[1] + number * part.shape[1])
        places = [b.constant(i32, corner[dim]) for dim in order]
        b.create("mt.tma_store", [], [place, *places], attributes)
    b.create("mt.tma_store_wait", [], [], {"pending": i32_attr(0), "read": ir.UnitAttr.get()})
    return kernel.ptx(), slots * 2 * int(np.prod(part.shape))


def run(ptx, shared, x, y, order, box, span=128, landing="late"):
    """Runs it with y [rows, columns] (of order (0, 1) if transposed in memory) as the tensor."""
    stride = y.strides[order[1]]
    dims = (y.shape[order[0]], y.shape[order[1]])
    memory = y if order == (1, 0) else y.T
    tensor = TensorMap(memory.ctypes.data, 2, dims, (stride,), tuple(box), swizzle=span)
    arrays = (x, memory)
    Emulator(ptx).launch(
        "kernel", grid=(1, 1, 1), block=(32 * WARPS, 1, 1), shared_bytes=shared, landing=landing,
        params=[*(a.ctypes.data.to_bytes(8, "little") for a in arrays), tensor.pack()],
        allocations=[Allocation(a.ctypes.data, a.nbytes, f"arg{i}") for i, a in enumerate(arrays)],
    )  # fmt: skip


def expected(y, x, start):
    """y with the part of x that lies inside it."""
    out = y.copy()
    rows, columns = (np.arange(n) + s for n, s in zip(x.shape, start, strict=True))
    inside = [(c >= 0) & (c < n) for c, n in zip((rows, columns), y.shape, strict=True)]
    out[np.ix_(rows[inside[0]], columns[inside[1]])] = x[np.ix_(*inside)]
    return out


ACCUMULATOR = mma_accumulator((64, 128), (4, 1))
CASES = {
    "whole": (ACCUMULATOR, (1, 0), [64, 64], (0, 0), None, 128),
    "pieces": (ACCUMULATOR, (1, 0), [32, 64], (3, 40), 32, 64),
    "edges": (ACCUMULATOR, (1, 0), [64, 64], (-5, 70), 64, 128),
    "warps beside each other": (
        mma_accumulator((64, 128), (2, 2)),
        (1, 0),
        [64, 64],
        (9, 9),
        64,
        128,
    ),
    "columns first": (mma_accumulator((64, 64), (4, 1)), (0, 1), [64, 16], (8, 5), 16, 128),
    "blocked": (
        blocked((64, 128), (1, 8), (4, 8), (4, 1), (1, 0)),
        (1, 0),
        [64, 64],
        (1, 0),
        None,
        128,
    ),
    "tall": (mma_accumulator((512, 32), (4, 1)), (1, 0), [32, 256], (0, 0), None, 64),
}


@pytest.mark.parametrize("landing", ["early", "late", "random"])
@pytest.mark.parametrize("name", CASES)
@with_context
def test_a_tile_reaches_memory(name, landing):
    source, order, box, start, width, span = CASES[name]
    rng = np.random.default_rng(5)
    x = rng.standard_normal(source.shape).astype(np.float16)
    y = rng.standard_normal((528, 144) if order == (1, 0) else (144, 80)).astype(np.float16)
    if order == (0, 1):
        y = np.asfortranarray(y)
    want = expected(y, x, start)
    ptx, shared = storing_kernel(source, order, box, start, width, span)
    run(ptx, shared, x, y, order, box, span, landing)
    np.testing.assert_array_equal(y, want)


@with_context
def test_accumulators_go_by_stmatrix():
    for name, suffix in (("whole", "b16"), ("columns first", "trans")):
        source, order, box, start, width, span = CASES[name]
        ptx, _ = storing_kernel(source, order, box, start, width, span)
        elements = int(np.prod(source.shape)) // (32 * WARPS)
        assert ptx.count("stmatrix.sync.aligned.m8n8.x4") == elements // 8
        assert suffix in ptx and "st.shared" not in ptx
        check_assembles(ptx, "sm_90a")


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a", "sm_120a"])
@with_context
def test_targets_with_tma_assemble_it(target):
    source, order, box, start, width, span = CASES["pieces"]
    check_assembles(storing_kernel(source, order, box, start, width, span, target)[0], target)


@pytest.mark.parametrize("missing", ["fence", "waits"])
@with_context
def test_the_emulator_sees_what_is_missing(missing):
    source, order, box, start, width, span = CASES["pieces"]
    ptx, shared = storing_kernel(source, order, box, start, width, span, **{missing: False})
    x = np.random.default_rng(6).standard_normal(source.shape).astype(np.float16)
    y = np.zeros((528, 144), np.float16)
    with pytest.raises(SharedRace):
        run(ptx, shared, x, y, order, box, span)
