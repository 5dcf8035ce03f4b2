"""Global loads and stores: vector widths, masks, modifiers, replicated tiles."""

import re

import numpy as np
import pytest

from minitriton.ir.dialect import with_element
from minitriton.ir.layouts import blocked
from minitriton.ir.linear_layout import LinearLayout
from minitriton.ir.mlir import ir
from tests.codegen.tile_kernel import (
    ALL_TARGETS,
    TileKernel,
    check_assembles,
    random_blocked,
    run,
    with_context,
)  # fmt: skip

STORAGE = {"i8": np.uint8, "f16": np.uint16, "bf16": np.uint16, "f32": np.uint32, "f64": np.uint64}
WARPS = 2


def i1_tile(kernel, argument, layout):
    """A mask read from an argument of bytes."""
    value = kernel.load(argument, layout)
    type_ = with_element(value.type, ir.IntegerType.get_signless(1))
    return kernel.builder.op("arith.trunci", type_, (value,))


def wide(layout_size=2):
    return blocked((256,), (layout_size,), (32,), (WARPS,), (0,))


@pytest.mark.parametrize("element", STORAGE)
@pytest.mark.parametrize("with_other", [True, False])
@with_context
def test_masked_load_and_store(element, with_other):
    rng = np.random.default_rng(1)
    layout = wide(4)
    kernel = TileKernel([element, "i8", element, element], WARPS)
    mask = i1_tile(kernel, 1, layout)
    pointers = kernel.pointers(0, layout)
    extras = [kernel.load(2, layout)] if with_other else []
    type_ = with_element(pointers.type, ir.Type.parse(element))
    value = kernel.builder.op("mt.load", type_, [pointers, mask, *extras])
    kernel.store(3, value)
    dtype = STORAGE[element]
    x, other = (rng.integers(1, 100, 256).astype(dtype) for _ in range(2))
    keep = rng.integers(0, 2, 256).astype(np.uint8)
    out = np.zeros_like(x)
    run(kernel.ptx(), [x, keep, other, out], WARPS)
    np.testing.assert_array_equal(out, np.where(keep, x, other if with_other else 0))


@pytest.mark.parametrize("element", STORAGE)
@with_context
def test_masked_store_leaves_the_rest_alone(element):
    rng = np.random.default_rng(2)
    layout = wide(4)
    kernel = TileKernel([element, "i8", element], WARPS)
    mask = i1_tile(kernel, 1, layout)
    value = kernel.load(0, layout)
    kernel.builder.create("mt.store", [], [kernel.pointers(2, layout), value, mask])
    dtype = STORAGE[element]
    x, out = (rng.integers(1, 100, 256).astype(dtype) for _ in range(2))
    keep = rng.integers(0, 2, 256).astype(np.uint8)
    expected = np.where(keep, x, out)
    run(kernel.ptx(), [x, keep, out], WARPS)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("seed", range(12))
@with_context
def test_random_layouts_copy(seed):
    rng = np.random.default_rng(seed)
    shape = [(512,), (16, 32), (64, 4), (8, 4, 16), (4, 4)][seed % 5]
    element = list(STORAGE)[seed % len(STORAGE)]
    layout = random_blocked(rng, shape, WARPS)
    kernel = TileKernel([element, element], WARPS)
    kernel.store(1, kernel.load(0, layout))
    x = rng.integers(0, 100, int(np.prod(shape))).astype(STORAGE[element])
    out = np.zeros_like(x)
    ptx = kernel.ptx()
    run(ptx, [x, out], WARPS)
    np.testing.assert_array_equal(out, x)
    check_assembles(ptx, "sm_80")


@pytest.mark.parametrize(
    ("element", "registers", "expected"),
    [("f32", 4, "v4.b32"), ("f32", 2, "v2.b32"), ("f16", 8, "v4.b32"), ("bf16", 2, "b32"),
     ("i8", 16, "v4.b32"), ("i8", 2, "b16"), ("f64", 2, "v2.b64"), ("f32", 1, "b32")],
)  # fmt: skip
@with_context
def test_vector_width(element, registers, expected):
    layout = blocked((1024,), (registers,), (32,), (WARPS,), (0,))
    kernel = TileKernel([element, element], WARPS)
    kernel.store(1, kernel.load(0, layout))
    ptx = kernel.ptx()
    assert re.search(rf"ld\.global\.{re.escape(expected)} ", ptx), ptx
    assert re.search(rf"st\.global\.{re.escape(expected)} ", ptx), ptx
    # one address per argument; the other vectors are at constant distances
    assert len(re.findall(r"add\.s64|mad\.wide", ptx)) <= 2


@with_context
def test_only_one_thread_stores_a_replicated_element():
    # lane bit 4 and warp bit 0 repeat the same 32 elements
    layout = LinearLayout.from_flat((32,), {"register": [16], "lane": [1, 2, 4, 8, 0], "warp": [0]})
    kernel = TileKernel(["f32", "f32"], WARPS)
    kernel.store(1, kernel.load(0, layout))
    ptx = kernel.ptx()
    assert len(re.findall(r"@%p\d+ st\.global", ptx)) == 2
    x, out = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    run(ptx, [x, out], WARPS)
    np.testing.assert_array_equal(out, x)


@with_context
def test_scalars():
    kernel = TileKernel(["f32", "i8", "f32"], WARPS)
    build, arguments = kernel.builder, kernel.block.arguments
    f32, i8, i1 = (ir.Type.parse(t) for t in ("f32", "i8", "i1"))
    flag = build.op("arith.trunci", i1, (build.op("mt.load", i8, (arguments[1],)),))
    other = build.constant(f32, 7.0)
    value = build.op("mt.load", f32, (arguments[0], flag, other))
    build.create("mt.store", [], [arguments[2], value])
    ptx = kernel.ptx()
    for bit in (0, 1):
        out = np.zeros(1, np.float32)
        run(ptx, [np.full(1, 3, np.float32), np.full(1, bit, np.uint8), out], WARPS)
        assert out[0] == (3 if bit else 7)


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [({"cache": '"cg"'}, "ld.global.cg.b32"), ({"cache": '"ca"'}, "ld.global.ca.b32"),
     ({"evict": '"evict_first"'}, "ld.global.L1::evict_first.L2::cache_hint.b32"),
     ({"evict": '"evict_last"'}, "ld.global.L1::evict_last.L2::cache_hint.b32"),
     ({"volatile": "unit"}, "ld.volatile.global.b32")],
)  # fmt: skip
@with_context
def test_load_modifiers(attributes, expected):
    layout = blocked((64,), (1,), (32,), (WARPS,), (0,))
    kernel = TileKernel(["f32", "f32"], WARPS)
    pointers = kernel.pointers(0, layout)
    type_ = with_element(pointers.type, ir.F32Type.get())
    parsed = {k: ir.Attribute.parse(v) for k, v in attributes.items()}
    kernel.store(1, kernel.builder.op("mt.load", type_, [pointers], parsed))
    ptx = kernel.ptx()
    assert expected in ptx
    check_assembles(ptx, "sm_80")
    x, out = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    run(ptx, [x, out], WARPS)
    np.testing.assert_array_equal(out, x)


@pytest.mark.parametrize("arch", ALL_TARGETS)
@pytest.mark.parametrize("masked", [False, True])
@with_context
def test_eviction_priorities(arch, masked):
    """In L1 and in L2, whose policies are made once; of masked accesses and of stores."""
    layout = wide(2)
    kernel = TileKernel(["f16", "i8", "f16"], WARPS, arch)
    mask = [i1_tile(kernel, 1, layout)] if masked else []
    pointers = kernel.pointers(0, layout)
    type_ = with_element(pointers.type, ir.F16Type.get())
    first, last = ({"evict": ir.StringAttr.get(f"evict_{end}")} for end in ("first", "last"))
    b, to = kernel.builder, kernel.pointers(2, layout)
    values = [b.op("mt.load", type_, [pointers, *mask], hint) for hint in (last, first)]
    total = b.op("arith.addf", type_, values)
    b.create("mt.store", [], [to, total, *mask], first)
    ptx = kernel.ptx()
    for end, text in (("first", "ld"), ("last", "ld"), ("first", "st")):
        assert f"{text}.global.L1::evict_{end}.L2::cache_hint" in ptx
        assert ptx.count(f"createpolicy.fractional.L2::evict_{end}.b64") == 1
    check_assembles(ptx, arch)
    count = int(np.prod(layout.shape))
    x, bits = np.arange(count).astype(np.float16) % 64, (np.arange(count) // 2 % 3 > 0)
    out = np.full(count, -1, np.float16)
    run(ptx, [x, bits.astype(np.uint8), out], WARPS)
    np.testing.assert_array_equal(out, np.where(bits, 2 * x, -1) if masked else 2 * x)


@pytest.mark.parametrize("cache", ["wb", "cg", "cs", "wt"])
@with_context
def test_store_modifiers(cache):
    layout = blocked((256,), (4,), (32,), (WARPS,), (0,))
    kernel = TileKernel(["f32", "f32"], WARPS)
    value = kernel.load(0, layout)
    attributes = {"cache": ir.StringAttr.get(cache)}
    kernel.builder.create("mt.store", [], [kernel.pointers(1, layout), value], attributes)
    ptx = kernel.ptx()
    assert f"st.global.{cache}.v4.b32" in ptx
    check_assembles(ptx, "sm_80")


@pytest.mark.parametrize("arch", ALL_TARGETS)
@with_context
def test_masked_copy_assembles(arch):
    layout = wide(4)
    kernel = TileKernel(["f16", "i8", "f16"], WARPS, arch)
    mask = i1_tile(kernel, 1, layout)
    pointers = kernel.pointers(0, layout)
    type_ = with_element(pointers.type, ir.F16Type.get())
    value = kernel.builder.op("mt.load", type_, [pointers, mask])
    kernel.builder.create("mt.store", [], [kernel.pointers(2, layout), value, mask])
    check_assembles(kernel.ptx(), arch)
