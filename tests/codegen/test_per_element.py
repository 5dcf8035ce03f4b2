"""Inline PTX, functions of scalars and fp4 on random layouts, fewer elements than `pack` too."""

import numpy as np
import pytest

from minitriton.ir.builder import i32_attr
from minitriton.ir.layouts import blocked
from minitriton.ir.mlir import ir
from tests.codegen.tile_kernel import (
    ALL_TARGETS,
    TileKernel,
    check_assembles,
    random_blocked,
    run,
    with_context,
)


def asm_op(kernel, name, text, constraints, pack, values, elements):
    """Results of mt.<name>, in the layout of the operands."""
    attributes = {
        "asm": ir.StringAttr.get(text),
        "constraints": ir.StringAttr.get(constraints),
        "pack": i32_attr(pack),
    }
    types = [
        ir.RankedTensorType.get(
            list(values[0].type.shape), ir.Type.parse(e), encoding=values[0].type.encoding
        )
        for e in elements
    ]
    return list(kernel.builder.create(f"mt.{name}", types, values, attributes).results)


def and_xor(kernel, layout, pack=4):
    """Stores x & y and x ^ y of bytes."""
    values = [kernel.load(0, layout), kernel.load(1, layout)]
    text = "and.b32 $0, $2, $3; xor.b32 $1, $2, $3;"
    for number, value in enumerate(
        asm_op(kernel, "elementwise_asm", text, "=r,=r,r,r", pack, values, ["i8", "i8"])
    ):
        kernel.store(2 + number, value)


@pytest.mark.parametrize("num_warps", [1, 4])
@with_context
def test_packed_bytes(num_warps):
    rng = np.random.default_rng(num_warps)
    for shape in ((32,), (256,), (8, 64), (4, 8, 32)):
        for pack in (1, 2, 4):
            layout = random_blocked(rng, shape, num_warps)
            kernel = TileKernel(["i8"] * 4, num_warps)
            and_xor(kernel, layout, pack)
            x, y = rng.integers(-128, 128, (2, *shape)).astype(np.int8)
            arrays = [x, y, np.zeros_like(x), np.zeros_like(x)]
            run(kernel.ptx(), arrays, num_warps)
            np.testing.assert_array_equal(arrays[2], x & y)
            np.testing.assert_array_equal(arrays[3], x ^ y)


@with_context
def test_repeated_registers_run_once():
    """Of registers that repeat an element one text is emitted: 32 elements in 32 lanes."""
    layout = blocked((32,), (4,), (32,), (1,), (0,))
    kernel = TileKernel(["i32", "i32"], 1)
    value = kernel.load(0, layout)
    (result,) = asm_op(kernel, "effectful_asm", "not.b32 $0, $1;", "=r,r", 1, [value], ["i32"])
    kernel.store(1, result)
    ptx = kernel.ptx()
    assert ptx.count("not.b32") == len(set(layout.registers)) >> bin(
        layout.free_bits("register")
    ).count("1")
    x = np.arange(32, dtype=np.int32)
    out = np.zeros_like(x)
    run(ptx, [x, out], 1)
    np.testing.assert_array_equal(out, ~x)


@with_context
def test_effects_are_volatile_and_clobber_memory():
    layout = blocked((128,), (1,), (32,), (4,), (0,))
    for name, pure in (("elementwise_asm", True), ("effectful_asm", False)):
        kernel = TileKernel(["i32"], 4)
        asm_op(kernel, name, "not.b32 $0, $1;", "=r,r", 1, [kernel.load(0, layout)], ["i32"])
        assert ("not.b32" in kernel.ptx()) is not pure  # nobody reads the result


@pytest.mark.parametrize("pack", [1, 2])
@with_context
def test_functions_of_scalars(pack):
    rng = np.random.default_rng(pack)
    for shape in ((32,), (512,), (16, 32)):
        layout = random_blocked(rng, shape, 4)
        kernel = TileKernel(["i32"] * 4, 4)
        values = [kernel.load(0, layout), kernel.load(1, layout)]
        op = kernel.builder.create(
            "mt.map_elementwise", [values[0].type] * 2, values, {"pack": i32_attr(pack)}, regions=1
        )
        i32 = ir.IntegerType.get_signless(32)
        block = op.regions[0].blocks.append(
            *[i32] * (2 * pack), arg_locs=[ir.Location.unknown()] * (2 * pack)
        )
        a, b = list(block.arguments)[:pack], list(block.arguments)[pack:]
        with kernel.builder.at(ir.InsertionPoint(block)):
            sums, products = (
                [kernel.builder.op(name, i32, pair) for pair in zip(a, b, strict=True)]
                for name in ("arith.addi", "arith.muli")
            )
            kernel.builder.create("mt.yield", [], [*sums, *products])
        for number, value in enumerate(op.results):
            kernel.store(2 + number, value)
        x, y = rng.integers(-99, 99, (2, *shape)).astype(np.int32)
        arrays = [x, y, np.zeros_like(x), np.zeros_like(x)]
        run(kernel.ptx(), arrays, 4)
        np.testing.assert_array_equal(arrays[2], x + y)
        np.testing.assert_array_equal(arrays[3], x * y)


def unpacked(kernel, layout, element):
    value = kernel.load(0, layout)
    type_ = ir.RankedTensorType.get(
        list(layout.shape), ir.Type.parse(element), encoding=value.type.encoding
    )
    for number, half in enumerate(
        kernel.builder.create("mt.unpack_e2m1", [type_] * 2, [value]).results
    ):
        kernel.store(1 + number, half)


@pytest.mark.parametrize("element", ["f16", "bf16"])
@with_context
def test_all_fp4_codes(element):
    rng = np.random.default_rng(4)
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    numbers = np.concatenate([numbers, -numbers])
    for arch, shape in (("sm_80", (256,)), ("sm_90a", (2, 128)), ("sm_80", (32,))):
        kernel = TileKernel(["i8", element, element], 2, arch)
        unpacked(kernel, random_blocked(rng, shape, 2), element)
        codes = np.resize(rng.permutation(256), shape).astype(np.uint8)
        low, high = (np.zeros(shape, np.uint16) for _ in range(2))
        run(kernel.ptx(), [codes, low, high], 2)
        for bits, half in ((low, codes & 15), (high, codes >> 4)):
            if element == "bf16":
                found = (bits.astype(np.uint32) << 16).view(np.float32)
            else:
                found = bits.view(np.float16).astype(np.float32)
            np.testing.assert_array_equal(found.view(np.int32), numbers[half].view(np.int32))


@pytest.mark.parametrize("arch", ALL_TARGETS)
@with_context
def test_assembles(arch):
    layout = random_blocked(np.random.default_rng(1), (16, 256), 4)
    kernel = TileKernel(["i8"] * 4, 4, arch)
    and_xor(kernel, layout)
    check_assembles(kernel.ptx(), arch)
    kernel = TileKernel(["i8", "bf16", "bf16"], 4, arch)
    unpacked(kernel, layout, "bf16")
    check_assembles(kernel.ptx(), arch)
