"""Atomics on every type, masked, replicated and scalar, with and without use of the old value."""

import re

import ml_dtypes
import numpy as np
import pytest

from minitriton.ir.builder import i32_attr
from minitriton.ir.dialect import with_element
from minitriton.ir.layouts import blocked
from minitriton.ir.linear_layout import LinearLayout
from minitriton.ir.mlir import ir
from tests.codegen.tile_kernel import (
    ALL_TARGETS,
    TileKernel,
    check_assembles,
    run,
    with_context,
)  # fmt: skip

WARPS, SIZE = 2, 128
DTYPES = {
    "i16": np.int16, "i32": np.int32, "i64": np.int64, "f16": np.float16,
    "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64,
}  # fmt: skip
REPLICATED = LinearLayout.from_flat((32,), {"register": [1], "lane": [2, 4, 8, 16, 0], "warp": [0]})


def order(kind=None, sem="relaxed", scope="gpu"):
    found = {"sem": ir.StringAttr.get(sem), "scope": ir.StringAttr.get(scope)}
    if kind:
        found["kind"] = ir.StringAttr.get(kind)
    return found | {"mt.offset": i32_attr(0)}


def rmw(kernel, kind, pointers, value, mask=None, **how):
    operands = [pointers, value] + ([mask] if mask is not None else [])
    return kernel.builder.op("mt.atomic_rmw", value.type, operands, order(kind, **how))


REFERENCE = {
    "add": np.add, "fadd": np.add, "max": np.maximum, "min": np.minimum, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "xchg": lambda old, new: new,
}  # fmt: skip
CASES = [(k, t) for k in ("add", "max", "min", "and", "or", "xor", "xchg") for t in ("i32", "i64")]
CASES += [("fadd", t) for t in ("f16", "bf16", "f32", "f64")]
CASES += [("xchg", t) for t in ("f16", "f32", "f64")]


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize(("kind", "element"), CASES)
@with_context
def test_tile(kind, element, used, target):
    rng = np.random.default_rng(3)
    dtype = DTYPES[element]
    layout = blocked((SIZE,), (2,), (32,), (WARPS,), (0,))
    kernel = TileKernel([element, element, element, "i8"], WARPS, target)
    keep = kernel.load(3, layout)
    mask = kernel.builder.op(
        "arith.trunci", with_element(keep.type, ir.IntegerType.get_signless(1)), (keep,)
    )
    old = rmw(kernel, kind, kernel.pointers(0, layout), kernel.load(1, layout), mask)
    if used:
        kernel.store(2, old)
    ptx = kernel.ptx()
    memory, values = (rng.integers(-50, 50, SIZE).astype(dtype) for _ in range(2))
    before, seen = memory.copy(), np.zeros_like(memory)
    flags = rng.integers(0, 2, SIZE).astype(np.uint8)
    run(ptx, [memory, values, seen, flags], WARPS)
    new = REFERENCE[kind](before, values).astype(dtype)
    np.testing.assert_array_equal(memory.astype(float), np.where(flags, new, before).astype(float))
    if used:
        np.testing.assert_array_equal(
            seen.astype(float)[flags == 1], before.astype(float)[flags == 1]
        )
    check_assembles(ptx, target)
    loop = kind == "fadd" and element == "bf16" and target == "sm_80"
    if not used and kind != "xchg" and not loop:
        assert "red." in ptx and "atom." not in ptx


@pytest.mark.parametrize("element", ["i32", "f16", "f64"])
@with_context
def test_replicated_tile_acts_once_and_all_see_the_old_value(element):
    kind = "add" if element == "i32" else "fadd"
    kernel = TileKernel([element, element, element], WARPS)
    value = kernel.load(1, REPLICATED)
    old = rmw(kernel, kind, kernel.pointers(0, REPLICATED), value)
    # every thread adds what it saw to its element: wrong unless all copies are the same
    spread = kernel.convert(old, blocked((32,), (1,), (32,), (WARPS,), (0,)), offset=1024)
    kernel.store(2, spread)
    dtype = DTYPES[element]
    memory, values = np.arange(32).astype(dtype), np.full(32, 3, dtype)
    seen = np.zeros(32, dtype)
    run(kernel.ptx(), [memory, values, seen], WARPS, shared_bytes=4096)
    np.testing.assert_array_equal(memory.astype(float), np.arange(32) + 3.0)
    np.testing.assert_array_equal(seen.astype(float), np.arange(32))


@pytest.mark.parametrize("sem", ["relaxed", "acquire", "release", "acq_rel"])
@pytest.mark.parametrize("scope", ["cta", "gpu", "sys"])
@with_context
def test_scalar(sem, scope):
    kernel = TileKernel(["i32", "i32"], WARPS)
    build, arguments = kernel.builder, kernel.block.arguments
    one = build.constant(ir.IntegerType.get_signless(32), 5)
    old = rmw(kernel, "add", arguments[0], one, sem=sem, scope=scope)
    layout = blocked((64,), (1,), (32,), (WARPS,), (0,))
    type_ = kernel.index(layout).type
    kernel.store(1, build.op("mt.splat", type_, (old,)))
    ptx = kernel.ptx()
    assert f".{sem}.{scope}.global.add.u32" in ptx
    check_assembles(ptx, "sm_80")
    memory, seen = np.full(1, 40, np.int32), np.zeros(64, np.int32)
    run(ptx, [memory, seen], WARPS, shared_bytes=16)
    assert memory[0] == 45 and (seen == 40).all()


@pytest.mark.parametrize("sem", ["relaxed", "release", "acq_rel"])
@with_context
def test_unused_scalar_needs_no_shared_memory(sem):
    kernel = TileKernel(["f32"], WARPS)
    one = kernel.builder.constant(ir.F32Type.get(), 1.0)
    rmw(kernel, "fadd", kernel.block.arguments[0], one, sem=sem)
    memory = np.zeros(1, np.float32)
    run(kernel.ptx(), [memory], WARPS)
    assert memory[0] == 1


@pytest.mark.parametrize("element", ["i16", "i32", "i64"])
@with_context
def test_compare_and_swap(element):
    rng = np.random.default_rng(1)
    dtype = DTYPES[element]
    layout = blocked((SIZE,), (2,), (32,), (WARPS,), (0,))
    kernel = TileKernel([element] * 4, WARPS)
    operands = [kernel.pointers(0, layout), kernel.load(1, layout), kernel.load(2, layout)]
    old = kernel.builder.op("mt.atomic_cas", operands[1].type, operands, order())
    kernel.store(3, old)
    ptx = kernel.ptx()
    check_assembles(ptx, "sm_80")
    memory, expected, new = (rng.integers(0, 2, SIZE).astype(dtype) for _ in range(3))
    before, seen = memory.copy(), np.zeros(SIZE, dtype)
    run(ptx, [memory, expected, new, seen], WARPS)
    np.testing.assert_array_equal(seen, before)
    np.testing.assert_array_equal(memory, np.where(before == expected, new, before))


@pytest.mark.parametrize(("element", "target"), [("f16", "sm_80"), ("bf16", "sm_90a")])
@with_context
def test_neighbouring_halves_are_added_in_pairs(element, target):
    layout = blocked((SIZE,), (2,), (32,), (WARPS,), (0,))
    kernel = TileKernel([element, element], WARPS, target)
    rmw(kernel, "fadd", kernel.pointers(0, layout), kernel.load(1, layout))
    ptx = kernel.ptx()
    assert re.search(rf"red\.relaxed\.gpu\.global\.add\.noftz\.{element}x2", ptx)
    check_assembles(ptx, target)
    memory, values = (np.arange(SIZE).astype(DTYPES[element]) for _ in range(2))
    run(ptx, [memory, values], WARPS)
    np.testing.assert_array_equal(memory, (values + values).astype(memory.dtype))


@pytest.mark.parametrize("arch", ALL_TARGETS)
@with_context
def test_all_kinds_assemble(arch):
    layout = blocked((SIZE,), (2,), (32,), (WARPS,), (0,))
    for kind, element in CASES:
        kernel = TileKernel([element, element], WARPS, arch)
        rmw(kernel, kind, kernel.pointers(0, layout), kernel.load(1, layout), sem="acq_rel")
        check_assembles(kernel.ptx(), arch)
