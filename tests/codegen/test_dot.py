"""Dots of every type on tensor cores and on fused multiply-adds, against float64."""

import ml_dtypes
import numpy as np
import pytest

from minitriton.ir.builder import i32_attr
from minitriton.ir.fma_layout import fma_operand
from minitriton.ir.layouts import mma_accumulator, mma_operand
from minitriton.ir.mlir import ir
from tests.codegen.tile_kernel import (
    ALL_TARGETS,
    TileKernel,
    check_assembles,
    random_blocked,
    run,
    with_context,
)

NUMPY = {
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64,
    "i8": np.int8, "i32": np.int32, "f8E4M3FN": ml_dtypes.float8_e4m3fn,
    "f8E5M2": ml_dtypes.float8_e5m2,
}  # fmt: skip
BITS = {"f16": 16, "bf16": 16, "f32": 32, "i8": 8, "f8E4M3FN": 8, "f8E5M2": 8}


def dot_kernel(shape, types, warps, target="sm_80", precision="tf32", attributes=None, imprecise=0):
    """c + a @ b for ([batch,] M, N, K), element types (a, b, c); warps None: on multiply-adds."""
    *batch, m, n, k = shape
    num_warps = int(np.prod(warps)) if warps else 4
    kernel = TileKernel([*types, types[2]], num_warps, target)
    shapes = [(*batch, m, k), (*batch, k, n), (*batch, m, n)]
    extra = dict(attributes or {})
    if warps:
        bits = 16 if precision.startswith("bf16") else BITS[types[0]]
        layouts = [mma_operand(shapes[i], i, warps, bits) for i in range(2)]
        layouts.append(mma_accumulator(shapes[2], warps))
        extra["mt.warps"] = ir.DenseI32ArrayAttr.get(list(warps))
    else:
        c = random_blocked(np.random.default_rng(m), shapes[2], num_warps)
        layouts = [fma_operand(c, 0, k), fma_operand(c, 1, k), c]
        extra["mt.fma"] = ir.UnitAttr.get()
    a, b, c = (kernel.load(i, layout) for i, layout in enumerate(layouts))
    extra["input_precision"] = ir.StringAttr.get(precision)
    extra["max_imprecise"] = i32_attr(imprecise)
    kernel.store(3, kernel.builder.op("mt.dot", c.type, (a, b, c), extra))
    return kernel, shapes


def dot_error(shape, types, warps, scale=1.0, **options):
    """Largest error relative to |a| @ |b| + |c|; and the PTX."""
    kernel, shapes = dot_kernel(shape, types, warps, **options)
    rng = np.random.default_rng(sum(shape))
    arrays = []
    for element, array_shape in zip(types, shapes, strict=True):
        if element in ("i8", "i32"):
            arrays.append(rng.integers(-128, 128, array_shape).astype(NUMPY[element]))
        else:
            arrays.append((scale * rng.standard_normal(array_shape)).astype(NUMPY[element]))
    unsigned = [f"mt.unsigned_{side}" in (options.get("attributes") or {}) for side in "ab"]
    wide = [
        (x.view(np.uint8) if u else x).astype(np.float64)
        for x, u in zip(arrays, [*unsigned, False], strict=True)
    ]
    result = np.zeros_like(arrays[2])
    ptx = kernel.ptx()
    run(ptx, [*(x.view(np.uint8) for x in arrays), result.view(np.uint8)], kernel.num_warps)
    expected = wide[0] @ wide[1] + wide[2]
    bound = np.abs(wide[0]) @ np.abs(wide[1]) + np.abs(wide[2]) + 1e-30
    return (np.abs(result.astype(np.float64) - expected) / bound).max(), ptx


SHAPES = [(64, 64, 32), (16, 8, 64), (32, 128, 16), (128, 16, 32)]


@pytest.mark.parametrize("element", ["f16", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("warps", [(1, 1), (2, 2), (4, 1), (1, 4)], ids=str)
@with_context
def test_half(element, shape, warps):
    error, ptx = dot_error(shape, (element, element, "f32"), warps)
    assert error < 1e-6
    assert f"m16n8k16.row.col.f32.{element}" in ptx


@pytest.mark.parametrize("shape", [(8, 16, 16), (16, 4, 32), (4, 4, 16), (1, 8, 64)], ids=str)
@pytest.mark.parametrize("warps", [(1, 1), (2, 2)], ids=str)
@with_context
def test_smaller_than_the_instruction(shape, warps):
    assert dot_error(shape, ("f16", "f16", "f32"), warps)[0] < 1e-6


@pytest.mark.parametrize("warps", [(1, 2, 2), (4, 1, 1), (2, 2, 1)], ids=str)
@with_context
def test_batch(warps):
    assert dot_error((4, 32, 32, 32), ("bf16", "bf16", "f32"), warps)[0] < 1e-6


@with_context
def test_f16_accumulator():
    error, ptx = dot_error((32, 32, 64), ("f16", "f16", "f16"), (2, 2))
    assert error < 4e-3 and "f16.f16.f16.f16" in ptx


@pytest.mark.parametrize("sides", ["", "a", "b", "ab"])
@with_context
def test_int8(sides):
    attributes = {f"mt.unsigned_{side}": ir.UnitAttr.get() for side in sides}
    error, ptx = dot_error((32, 32, 64), ("i8", "i8", "i32"), (2, 2), attributes=attributes)
    assert error == 0
    names = ["u8" if side in sides else "s8" for side in "ab"]
    assert f".s32.{names[0]}.{names[1]}.s32" in ptx


@pytest.mark.parametrize("types", [("f8E4M3FN",) * 2, ("f8E5M2",) * 2], ids=str)
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90a"])
@with_context
def test_fp8(types, target):
    error, ptx = dot_error((32, 32, 64), (*types, "f32"), (2, 2), target=target)
    assert error < 1e-6
    assert ("m16n8k32" in ptx) == (target != "sm_80")


@pytest.mark.parametrize("target", ["sm_80", "sm_89"])
@with_context
def test_fp8_in_an_f16_accumulator(target):
    types = ("f8E4M3FN", "f8E4M3FN", "f16")
    assert dot_error((32, 32, 32), types, (2, 2), target=target)[0] < 4e-3


@pytest.mark.parametrize("element", ["f8E4M3FN", "f8E5M2"])
@with_context
def test_fp8_widening_is_exact(element):
    """Every byte times 1 in one place."""
    kernel, _ = dot_kernel((16, 16, 32), (element, element, "f32"), (1, 1))
    ptx = kernel.ptx()
    one = np.eye(32, 16, dtype=np.float32).astype(NUMPY[element])
    a = np.zeros((16, 32), np.uint8)
    a[:, :16] = np.arange(256).reshape(16, 16)
    result = np.zeros((16, 16), np.float32)
    values = a.view(NUMPY[element]).astype(np.float32)[:, :16]
    finite = np.isfinite(values).all(1)
    run(ptx, [a, one.view(np.uint8), np.zeros_like(result), result], 1)
    np.testing.assert_array_equal(result[finite], values[finite])
    assert np.isnan(result[~finite]).any(1).all()


@with_context
def test_fp8_bounded_chains():
    types = ("f8E4M3FN", "f8E4M3FN", "f32")
    error, ptx = dot_error((16, 16, 128), types, (1, 1), target="sm_90a", imprecise=64)
    assert error < 1e-6
    assert "add.rn.f32" in ptx or "add.f32" in ptx


@with_context
def test_f32_precisions():
    types = ("f32", "f32", "f32")
    once, _ = dot_error((32, 32, 64), types, (2, 2), precision="tf32")
    thrice, ptx = dot_error((32, 32, 64), types, (2, 2), precision="tf32x3")
    assert 1e-6 < once < 1e-3
    assert thrice < 1e-6 and ptx.count("mma.sync") == 3 * 2 * 1 * 8
    ieee, _ = dot_error((32, 32, 32), types, None, precision="ieee")
    assert ieee < 4e-7


@pytest.mark.parametrize(
    ("precision", "bound", "products"), [("bf16x3", 1e-5, 3), ("bf16x6", 1e-6, 6)]
)
@with_context
def test_f32_as_sums_of_bf16(precision, bound, products):
    error, ptx = dot_error((32, 32, 64), ("f32",) * 3, (2, 2), precision=precision)
    assert error < bound and ptx.count("mma.sync") == products * 2 * 1 * 4
    assert "m16n8k16.row.col.f32.bf16" in ptx


@pytest.mark.parametrize("precision", ["tf32x3", "bf16x3", "bf16x6"])
@with_context
def test_sums_of_parts_keep_infinities(precision):
    kernel, _ = dot_kernel((16, 8, 16), ("f32",) * 3, (1, 1), precision=precision)
    a, b = np.full((16, 16), 1.1, np.float32), np.full((16, 8), 0.7, np.float32)
    a[3, 2], b[5, 4] = np.inf, -np.inf
    result = np.zeros((16, 8), np.float32)
    run(kernel.ptx(), [a, b, np.zeros_like(result), result], 1)
    with np.errstate(invalid="ignore"):
        expected = a @ b
    np.testing.assert_allclose(result, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "types",
    [
        ("f64", "f64", "f64"), ("f32", "f32", "f32"), ("f16", "f16", "f32"),
        ("bf16", "bf16", "f32"),
        ("f16", "f16", "f16"), ("i8", "i8", "i32"), ("f8E4M3FN", "f8E4M3FN", "f32"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("shape", [(32, 16, 8), (2, 4, 2), (1, 16, 16), (2, 8, 16, 4)], ids=str)
@with_context
def test_multiply_adds(types, shape):
    error, ptx = dot_error(shape, types, None)
    assert error < {"f16": 1e-3, "f64": 1e-15, "i32": 1e-30}.get(types[2], 1e-6)
    assert "mma.sync" not in ptx


@pytest.mark.parametrize("arch", ALL_TARGETS)
@pytest.mark.parametrize("element", ["bf16", "f32", "i8", "f8E4M3FN"])
@with_context
def test_assembles(arch, element):
    accumulator = "i32" if element == "i8" else "f32"
    kernel, _ = dot_kernel((64, 64, 32), (element, element, accumulator), (2, 2), arch)
    check_assembles(kernel.ptx(), arch)
