"""cp.async into swizzled buffers: widths, masks with zero fill, late and early landing."""

import numpy as np
import pytest

from minitriton.codegen.emit import PREDICATES
from minitriton.ir.builder import i32_attr
from minitriton.ir.diagnostics import InternalError
from minitriton.ir.encoding import tile_type
from minitriton.ir.layouts import blocked, mma_operand, shared_for_mma_operand, shared_swizzled
from minitriton.ir.mlir import ir
from tests.codegen.test_shared import BITS, NUMPY, alloc, local_load
from tests.codegen.tile_kernel import ALL_TARGETS, TileKernel, check_assembles, run, with_context


def copy_kernel(element, layout, shared, num_warps, limit=None, target="sm_80", pending=0):
    """global -> shared by async_copy, then -> registers -> global. Elements from `limit` are
    masked off."""
    kernel = TileKernel([element, element], num_warps, target)
    b = kernel.builder
    operands = [kernel.pointers(0, layout), alloc(kernel, element, shared)]
    if limit is not None:
        i32, i1 = (ir.IntegerType.get_signless(n) for n in (32, 1))
        bound = b.constant(tile_type(i32, layout), limit)
        slt = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), PREDICATES.index("slt"))
        index = kernel.index(layout)
        mask = b.op("arith.cmpi", tile_type(i1, layout), (index, bound), {"predicate": slt})
        operands.append(mask)
    b.create("mt.async_copy", [], operands)
    b.create("mt.async_commit", [])
    b.create("mt.async_wait", [], (), {"pending": i32_attr(pending)})
    kernel.barrier()
    kernel.store(1, local_load(kernel, element, operands[1], layout))
    return kernel


def run_copy(element, layout, shared, num_warps, limit=None, landing="late", pending=0):
    """(input, output, PTX)."""
    ptx = copy_kernel(element, layout, shared, num_warps, limit, pending=pending).ptx()
    x = np.random.default_rng(0).integers(1, 100, layout.shape).astype(NUMPY[element])
    y = np.full_like(x, 77)
    run(ptx, [x, y], num_warps, x.nbytes, landing)
    return x, y, ptx


@pytest.mark.parametrize("landing", ["late", "early"])
@pytest.mark.parametrize("element", list(NUMPY))
@with_context
def test_sixteen_bytes(element, landing):
    vec = 128 // BITS[element]
    layout = blocked((64, 64), (1, vec), (32 * vec // 64, 64 // vec), (4, 1), (1, 0))
    shared = shared_for_mma_operand((64, 64), (1, 0), BITS[element])
    x, y, ptx = run_copy(element, layout, shared, 4, landing=landing)
    np.testing.assert_array_equal(y, x)
    assert "cp.async.cg.shared.global" in ptx and ", 16" in ptx


@pytest.mark.parametrize("vec", [2, 4, 8])
@with_context
def test_width_follows_layout(vec):
    layout = blocked((32, 32), (1, vec), (vec, 32 // vec), (2, 1), (1, 0))
    shared = shared_swizzled((32, 32), (1, 0), vec, 1, 4)
    x, y, ptx = run_copy("f16", layout, shared, 2)
    np.testing.assert_array_equal(y, x)
    assert ("cp.async.cg" in ptx) == (vec == 8)
    assert f"], {2 * vec};" in ptx or f"], {2 * vec}," in ptx


@pytest.mark.parametrize("limit", [0, 8, 1000, 1024])
@with_context
def test_masked_lanes_are_zero(limit):
    layout = blocked((1024,), (4,), (32,), (4,), (0,))
    shared = shared_swizzled((1024,), (0,), 1, 1, 1)
    x, y, _ = run_copy("f32", layout, shared, 4, limit)
    np.testing.assert_array_equal(y, np.where(np.arange(1024) < limit, x, 0))


@with_context
def test_replicated_pointers_copy_once():
    layout = blocked((16, 32), (1, 8), (8, 4), (8, 1), (1, 0))
    shared = shared_for_mma_operand((16, 32), (1, 0), 16)
    ptx = copy_kernel("f16", layout, shared, 8).ptx()
    x = np.random.default_rng(0).standard_normal((16, 32)).astype(np.float16)
    y = np.zeros_like(x)
    report = run(ptx, [x, y], 8, x.nbytes)
    np.testing.assert_array_equal(y, x)
    assert report.bytes["copy_async"] == x.nbytes


@with_context
def test_waiting_for_too_few_groups_is_seen():
    """The test's own check: without the wait the copy has not landed."""
    layout = blocked((64, 64), (1, 8), (4, 8), (4, 1), (1, 0))
    shared = shared_for_mma_operand((64, 64), (1, 0), 16)
    with pytest.raises(Exception, match="(?i)undefined|uninit|race|async"):
        x, y, _ = run_copy("f16", layout, shared, 4, pending=1)
        np.testing.assert_array_equal(y, x, "async copy not waited for")


@with_context
def test_narrow_copies_are_refused():
    layout = blocked((32, 32), (1, 1), (1, 32), (2, 1), (1, 0))
    shared = shared_swizzled((32, 32), (1, 0), 1, 1, 1)
    with pytest.raises(InternalError, match="2 bytes"):
        copy_kernel("f16", layout, shared, 2).ptx()


@pytest.mark.parametrize("arch", ALL_TARGETS)
@with_context
def test_assembles(arch):
    layout = blocked((64, 64), (1, 8), (4, 8), (4, 1), (1, 0))
    shared = shared_for_mma_operand((64, 64), (1, 0), 16)
    check_assembles(copy_kernel("f16", layout, shared, 4, 4000, arch).ptx(), arch)
    assert mma_operand((64, 64), 0, (2, 2), 16).shape == layout.shape
