"""Loops and branches over tiles, from Triton-style source down to PTX in the emulator."""

import re

import numpy as np
import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.ir.builder import Builder
from minitriton.ir.encoding import tile_type
from minitriton.ir.layouts import blocked
from minitriton.ir.mlir import ir
from tests.codegen.tile_kernel import TileKernel, run, with_context

WARPS, SIZE = 2, 512


def loop_over_rows(unroll=None):
    """out[i] = sum over 6 rows of x[row, i], with a tile of pointers stepped through the loop."""
    layout = blocked((SIZE,), (4,), (32,), (WARPS,), (0,))
    kernel = TileKernel(["f32", "f32"], WARPS)
    build = kernel.builder
    i32 = ir.IntegerType.get_signless(32)
    pointers = kernel.pointers(0, layout)
    total = build.constant(tile_type(ir.F32Type.get(), layout), 0.0)
    step = build.constant(tile_type(i32, layout), SIZE)
    bounds = [build.constant(i32, v) for v in (0, 6, 1)]
    attributes = {} if unroll is None else {"mt.unroll": ir.IntegerAttr.get(i32, unroll)}
    loop = build.create(
        "scf.for", [pointers.type, total.type], [*bounds, pointers, total], attributes, regions=1
    )
    block = loop.regions[0].blocks.append(
        i32, pointers.type, total.type, arg_locs=[ir.Location.unknown()] * 3
    )
    inner = Builder(ir.InsertionPoint(block))
    _, pointer, running = block.arguments
    value = inner.op("mt.load", total.type, (pointer,))
    running = inner.op("arith.addf", total.type, (running, value))
    pointer = inner.op("mt.addptr", pointer.type, (pointer, step))
    inner.create("scf.yield", [], [pointer, running])
    kernel.store(1, loop.results[1])
    return kernel


@with_context
def test_stepped_pointers_cost_one_value_per_vector():
    kernel = loop_over_rows()
    from minitriton.codegen.lower import lower_to_gpu

    kernel.builder.create("func.return", [])
    text = str(lower_to_gpu(kernel.module, kernel.target))
    header = next(line for line in text.splitlines() if "scf.for" in line)
    # 8 sums; both vectors of a thread are found from one pointer
    assert header.count("f32") == 8 and header.count("!llvm.ptr<1>") == 1, header


@with_context
def test_loop_result_and_rolled_by_default():
    ptx = loop_over_rows().ptx()
    x = np.random.default_rng(1).normal(size=(6, SIZE)).astype(np.float32)
    out = np.zeros(SIZE, np.float32)
    run(ptx, [x, out], WARPS)
    np.testing.assert_allclose(out, x.sum(0), rtol=1e-5, atol=1e-5)
    assert len(re.findall(r"ld\.global\.v4", ptx)) == 2
    unrolled = loop_over_rows(unroll=3).ptx()
    assert len(re.findall(r"ld\.global\.v4", unrolled)) == 6
    again = np.zeros(SIZE, np.float32)
    run(unrolled, [x, again], WARPS)
    np.testing.assert_array_equal(out, again)


@triton.jit
def nested_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    pointers = x_ptr + offsets
    total = tl.zeros([BLOCK], tl.float32)
    last = pointers
    for i in range(n):
        row = pointers
        for j in range(i):
            if j % 2 == 0:
                total += tl.load(row)
            else:
                total -= tl.load(row, mask=offsets > j, other=1.0)
            row += BLOCK
        last = row
        pointers += BLOCK
    tl.store(out_ptr + offsets, total + tl.load(last))


def test_nested_loops_carry_pointers_out():
    x = torch.randn(9, 128)
    out = torch.zeros(128)
    nested_kernel[(1,)](x, out, 5, BLOCK=128)
    total, last = torch.zeros(128), 0
    columns = torch.arange(128)
    for i in range(5):
        row = i
        for j in range(i):
            total += x[row] if j % 2 == 0 else -torch.where(columns > j, x[row], 1.0)
            row += 1
        last = row
    torch.testing.assert_close(out, total + x[last], rtol=1e-5, atol=1e-5)


@triton.jit
def while_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    steps = 0
    while tl.max(x, 0) > 1.0:
        x = x * 0.5
        steps += 1
    tl.store(out_ptr + offsets, x + steps)


def test_while_over_a_tile():
    x = torch.rand(64) * 100
    out = torch.zeros(64)
    while_kernel[(1,)](x, out, BLOCK=64)
    expected, steps = x.clone(), 0
    while expected.max() > 1:
        expected, steps = expected * 0.5, steps + 1
    torch.testing.assert_close(out, expected + steps)


@triton.jit
def empty_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    for _ in range(n, 0):
        x += 1
    if n > 100:
        x = x * 2
    tl.store(out_ptr + offsets, x)


def test_loop_without_iterations_and_branch_without_else():
    x, out = torch.randn(64), torch.zeros(64)
    empty_kernel[(1,)](x, out, 3, BLOCK=64)
    assert torch.equal(out, x)
    empty_kernel[(1,)](x, out, 300, BLOCK=64)
    assert torch.equal(out, x * 2)
