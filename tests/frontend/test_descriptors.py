"""Tensor descriptors and block pointers: the IR they become, and how control flow carries them."""

from __future__ import annotations

import re

import pytest
import torch

import minitriton.language as tl
from minitriton.frontend.build import build_module
from minitriton.frontend.signature import ParamSpec, Specialization
from minitriton.frontend.source import DeviceFunction as jit
from minitriton.frontend.source import SourceFunction
from minitriton.ir.context import use
from minitriton.ir.target import Target
from minitriton.tools.tensor_descriptor import TensorDescriptor, understand
from tests.frontend.support import build


def carried(text: str, op: str = "scf.for") -> list[str]:
    """Types that the only loop (or `if`) of a module carries."""
    (found,) = re.findall(rf"{op}\b.*?-> \((.*?)\)", text)
    return found.split(", ")


@jit
def loads(p, n, m, i):
    desc = tl.make_tensor_descriptor(p, [n, m], [m, 1], [16, 32])
    tl.static_assert(desc.dtype == tl.float16)
    tl.static_assert(desc.block_shape == (16, 32))
    tl.static_assert(desc.block_type == tl.block_type(tl.float16, (16, 32)))
    tl.static_assert(len(desc.shape) == 2 and desc.strides[1] == 1)
    tl.static_assert(isinstance(desc, tl.tensor_descriptor))
    tl.static_assert(not isinstance(p, tl.tensor_descriptor))
    tile = desc.load([i, 64])
    tl.static_assert(tile.shape == (16, 32) and tile.dtype == tl.float16)
    desc.store([i, 64], tile.to(tl.float32))


def test_form_of_a_load() -> None:
    """What later passes look for: one scalar offset of the base, one comparison a dimension."""
    text = build(loads, p="*fp16", n="i32", m="i32", i="i32")
    block = text.split("mt.load")[0]
    assert block.count('"mt.addptr"') == 2 and "-> !mt.ptr<f16>" in block
    assert re.findall(r"arith.cmpi (\w+)", block) == ["slt", "sge", "slt"]
    assert "divisibility = array<i64: 16>" in block  # of the base, in bytes
    assert "divisibility = array<i64: 8>" in block  # of the stride, in elements
    assert 'mt.load"(%' in text and "dense<0.000000e+00> : tensor<16x32xf16>" in text
    assert "arith.truncf" in text


@jit
def inside(p):
    desc = tl.make_tensor_descriptor(p, [64, 64], [64, 1], [16, 32])
    desc.store([16, 32], desc.load([0, 32]))
    desc.store([0, -1], desc.load([64, 0]))


def test_blocks_known_to_be_inside_need_no_mask() -> None:
    text = build(inside, p="*fp32")
    first, second = re.findall(r'"mt.load".*', text)
    assert first.count("tensor<") == 2 and "i1" not in first
    assert "tensor<16x32xi1>" in second
    assert re.findall(r"arith.cmpi (\w+)", text) == ["slt", "slt", "sge"]
    assert "i64" not in re.findall(r'"mt.addptr".*16x32.*', text)[0], "offsets fit 32 bits"


@jit
def signs(p, n, m):
    desc = tl.make_tensor_descriptor(p, [n], [1], [16])
    block = tl.make_block_ptr(p, (n,), (1,), (0,), (16,), (0,))
    for i in range(tl.program_id(0), n, 4):
        for j in range(0, 2):
            desc.store([min(i, j * 8) * 16 % m + i // 4], tl.load(block))
        block = tl.advance(block, (16,))
    for i in range(n, 0, -1):
        desc.store([i - 1], tl.load(block))


def test_offsets_known_not_to_be_negative() -> None:
    """Loops that count up, and what is computed of their variables without a difference."""
    inner, outer = build(signs, p="*fp32", n="i32", m="i32").split("scf.yield", 1)
    assert re.findall(r"arith.cmpi (\w+), .*tensor", inner) == ["slt"]
    assert re.findall(r"arith.cmpi (\w+), .*tensor", outer) == ["slt", "sge"]


@jit
def padded(p, q, n):
    desc = tl.make_tensor_descriptor(p, [n], [1], [16], padding_option="nan")
    block = tl.make_block_ptr(p, n, 1, 0, 16, 0)
    x = tl.load(block, boundary_check=0, padding_option="nan", cache_modifier=".cg")
    tl.store(q + tl.arange(0, 16), desc.load([4]) + x + tl.load(block))


def test_padding() -> None:
    text = build(padded, p="*fp32", q="*fp32", n="i32")
    assert text.count("dense<0x7FC00000> : tensor<16xf32>") == 2
    assert 'cache = "cg"' in text
    assert re.search(r'"mt.load"\(%\w+\) \{', text), "nothing is checked"


@jit
def walk(p, q, n, m):
    left = tl.make_block_ptr(p, (n, m), (m, 1), (tl.program_id(0) * 16, 0), (16, 32), (1, 0))
    total = tl.zeros((16, 32), tl.float32)
    for _ in range(0, m, 32):
        total += tl.load(left, boundary_check=(0, 1))
        left = tl.advance(left, (0, 32))
    left = left.advance((0, -32))
    tl.store(left, total, boundary_check=(0, 1))


def test_loops_carry_offsets_only() -> None:
    text = build(walk, p="*fp32", q="*fp32", n="i32", m="i32")
    assert carried(text) == ["i32", "i32", "tensor<16x32xf32>"]


@jit
def steps(p, n):
    block = tl.make_block_ptr(p, (n,), (1,), (0,), (16,), (0,))
    desc = tl.make_tensor_descriptor(p, [n], [1], [16])
    pair = (desc, block)
    i = 0
    while i < n:
        tl.store(pair[1], pair[0].load([i]) + 1)
        pair = (pair[0], tl.advance(pair[1], (16,)))
        i += 16
    if n > 3:
        block = tl.advance(block, (4,))
    else:
        desc = tl.make_tensor_descriptor(p + 16, [4], [1], [16])
    tl.store(block, desc.load([0]))


def test_branches_carry_what_differs() -> None:
    text = build(steps, p="*fp32", n="i32")
    assert carried(text, "scf.while") == ["i32", "i32"]
    assert carried(text, "scf.if") == ["i32", "!mt.ptr<f32>", "i32"]


@jit
def moved(block, by: tl.constexpr):
    return tl.advance(block, (by, 0)), block


@jit
def chosen(p, q, n):
    if n > 3:
        return tl.make_tensor_descriptor(p, [n, n], [n, 1], [16, 16])
    return tl.make_tensor_descriptor(q, [n, n], [n, 1], [16, 16])


@jit
def helpers(p, q, n):
    block = tl.make_block_ptr(p, (n, n), (n, 1), (0, 0), (16, 16), (1, 0))
    first, second = moved(block, 16)
    tl.static_assert(first.offsets == (16, 0) and second.offsets == (0, 0))
    tl.static_assert(first.dtype.element_ty == tl.float32)
    tl.static_assert(first.type.element_ty == tl.block_type(tl.float32, (16, 16)))
    desc = chosen(p, q, n)
    desc = desc if n > 5 else chosen(q, p, n)
    tl.store(first, tl.load_tensor_descriptor(desc, [0, 0]) + tl.load(second))
    tl.store_tensor_descriptor(desc, (0, 0), tl.load(second))
    first.store(0.0, boundary_check=(1,))


def test_through_functions() -> None:
    text = build(helpers, p="*fp32", q="*fp32", n="i32")
    ifs = re.findall(r"scf.if\b.*?-> \((.*?)\)", text)
    assert len(ifs) == 3 and set(ifs) == {"!mt.ptr<f32>, i64"}, "base and stride, made in branches"


@jit
def sizes(p, big, small, wide):
    block = tl.make_block_ptr(p, (big, small), (wide, 1), (0, small), (16, 16), (0, 1))
    tl.store(block, 1.0, boundary_check=(1, 0))
    whole = tl.make_block_ptr(p, (2**40, 16), (2**40, 1), (5, 0), (16, 16), (1, 0))
    tl.store(whole, 1.0, boundary_check=(0, 1))


def test_sizes_of_64_bits() -> None:
    """A block pointer's sizes are compared in their own width."""
    text = build(sizes, p="*fp32", big="i64", small="i16", wide="i64")
    compared = re.findall(r"arith.cmpi slt, .* : (tensor<\w+>)", text)
    assert compared == ["tensor<16xi64>", "tensor<16xi32>"]


@jit
def flags(p, n):
    desc = tl.make_tensor_descriptor(p, [n], [1], [16])
    block = tl.make_block_ptr(p, (n,), (1,), (0,), (16,), (0,))
    tl.static_assert(desc.load([0]).dtype == tl.int1)
    tl.static_assert(tl.load(block, boundary_check=(0,)).dtype == tl.int8)
    desc.store([0], ~desc.load([0]))


def test_truth_values_take_a_byte() -> None:
    text = build(flags, p="*int1", n="i32")
    assert '"mt.load"' in text and "tensor<16xi8>" in text


def host(desc, n):
    tile = desc.load([n, 0])
    desc.store([0, 0], tile)


@pytest.mark.parametrize("aligned", [True, False])
def test_host_descriptors(aligned: bool) -> None:
    width = 64 if aligned else 60
    made = TensorDescriptor(torch.zeros(9, 64).bfloat16(), [9, width], [64, 1], [8, 32])
    desc, _ = understand("desc", made)
    params = desc, ParamSpec("n", "scalar", "int32")
    with use():
        target = Target.parse("sm_90a")
        module = build_module(SourceFunction(host), Specialization(params), target)
        assert module.operation.verify()
        text = str(module)
    assert "!mt.ptr<bf16>" in text and 'mt.name = "desc.strides.0"' in text
    assert text.count("mt.divisibility = 8") == 1 + aligned and "mt.hint" not in text
