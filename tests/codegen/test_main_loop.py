"""A hand-built pipelined matmul: cp.async, ldmatrix and mma.sync together, and its SASS."""

import collections
import re

import ml_dtypes
import numpy as np
import pytest

from minitriton.codegen.emit import PREDICATES
from minitriton.ir.builder import i32_attr
from minitriton.ir.encoding import tile_type
from minitriton.ir.layouts import blocked, mma_accumulator, mma_operand, shared_for_mma_operand
from minitriton.ir.mlir import ir
from minitriton.runtime.assembler import assemble, disassemble
from tests.codegen.tile_kernel import TileKernel, mem_type, run, with_context

M, N, K, STAGES, WARPS = 128, 128, 32, 3, (2, 2)
SHARED_BYTES = STAGES * (M * K + K * N) * 2


class _Side:
    """One operand: layouts, shared buffer and pointers; tile t of it starts at t * rows * cols."""

    def __init__(self, kernel, argument, shape, op_index, offset):
        lanes = min(32, shape[1] // 8)
        self.kernel, self.shape = kernel, shape
        self.layout = blocked(shape, (1, 8), (32 // lanes, lanes), (4, 1), (1, 0))
        self.fragment = mma_operand(shape, op_index, WARPS, 16)
        shared = shared_for_mma_operand(shape, (1, 0), 16)
        self.element = ir.BF16Type.get()
        self.slot = mem_type(self.element, shared)
        attributes = {"mt.offset": i32_attr(offset)}
        self.buffer = kernel.builder.op(
            "mt.local_alloc", mem_type(self.element, shared, STAGES), (), attributes
        )
        self.pointers = kernel.pointers(argument, self.layout)

    def place(self, index):
        return self.kernel.builder.op("mt.mem_index", self.slot, (self.buffer, index))

    def copy(self, pointers, index, wanted=None):
        b, operands = self.kernel.builder, [pointers, self.place(index)]
        if wanted is not None:
            operands.append(b.op("mt.splat", tile_type(wanted.type, self.layout), (wanted,)))
        b.create("mt.async_copy", [], operands)

    def step(self, pointers):
        i32 = ir.IntegerType.get_signless(32)
        size = self.kernel.builder.constant(tile_type(i32, self.layout), int(np.prod(self.shape)))
        return self.kernel.builder.op("mt.addptr", pointers.type, (pointers, size))

    def load(self, index):
        type_ = tile_type(self.element, self.fragment)
        return self.kernel.builder.op("mt.local_load", type_, (self.place(index),))


def compare(b, predicate, x, y):
    i1, i64 = ir.IntegerType.get_signless(1), ir.IntegerType.get_signless(64)
    attributes = {"predicate": ir.IntegerAttr.get(i64, PREDICATES.index(predicate))}
    return b.op("arith.cmpi", i1, (x, y), attributes)


def matmul(target):
    kernel = TileKernel(["bf16", "bf16", "f32", "i32"], 4, target)
    b, i32 = kernel.builder, ir.IntegerType.get_signless(32)
    count = b.op("mt.load", i32, (kernel.block.arguments[3],))
    sides = [_Side(kernel, 0, (M, K), 0, 0), _Side(kernel, 1, (K, N), 1, STAGES * M * K * 2)]
    pointers = [side.pointers for side in sides]
    for stage in range(STAGES - 1):
        for index, side in enumerate(sides):
            side.copy(pointers[index], b.constant(i32, stage))
            pointers[index] = side.step(pointers[index])
        b.create("mt.async_commit", [])
    zero = b.constant(tile_type(ir.F32Type.get(), mma_accumulator((M, N), WARPS)), 0.0)
    bounds = [b.constant(i32, 0), count, b.constant(i32, 1)]
    slots = [b.constant(i32, 0), b.constant(i32, STAGES - 1)]
    carried = [zero, *pointers, *slots]
    types = [value.type for value in carried]
    loop = b.create("scf.for", types, [*bounds, *carried], regions=1)
    locs = [ir.Location.unknown()] * (1 + len(types))
    block = loop.regions[0].blocks.append(i32, *types, arg_locs=locs)
    with b.at(ir.InsertionPoint(block)):
        b.create("scf.yield", [], _body(kernel, sides, count, *block.arguments))
    kernel.store(2, loop.results[0])
    return kernel.ptx()


def _body(kernel, sides, count, step, total, a_pointers, b_pointers, reading, writing):
    b, i32 = kernel.builder, ir.IntegerType.get_signless(32)
    b.create("mt.async_wait", [], (), {"pending": i32_attr(STAGES - 2)})
    kernel.barrier()
    last = b.op("arith.subi", i32, (count, b.constant(i32, STAGES - 1)))
    wanted = compare(b, "slt", step, last)
    pointers = [a_pointers, b_pointers]
    for side, place in zip(sides, pointers, strict=True):
        side.copy(place, writing, wanted)
    b.create("mt.async_commit", [])
    attributes = {
        "input_precision": ir.StringAttr.get("tf32"),
        "max_imprecise": i32_attr(0),
        "mt.warps": ir.DenseI32ArrayAttr.get(list(WARPS)),
    }
    operands = (*(side.load(reading) for side in sides), total)
    result = b.op("mt.dot", total.type, operands, attributes)

    def following(slot):
        more = b.op("arith.addi", i32, (slot, b.constant(i32, 1)))
        wraps = compare(b, "eq", more, b.constant(i32, STAGES))
        return b.op("arith.select", i32, (wraps, b.constant(i32, 0), more))

    moved = [side.step(place) for side, place in zip(sides, pointers, strict=True)]
    return [result, *moved, following(reading), following(writing)]


def loop_instructions(sass):
    """Opcode counts of the loop: from the target of the last backward branch to the branch."""
    labels, waiting, code = {}, [], []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            waiting.append(label[1])
        elif found := re.search(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?\w+ )?([A-Z0-9_]+)(.*);", line):
            labels |= dict.fromkeys(waiting, len(code))
            waiting = []
            code.append((found[1], found[2]))
    loops = []
    for end, (name, rest) in enumerate(code):
        target = re.search(r"\.L_x_\d+", rest)
        if name == "BRA" and target and target[0] in labels and labels[target[0]] < end:
            loops.append(code[labels[target[0]] : end + 1])
    return collections.Counter(name for name, _ in max(loops, key=len))


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@with_context
def test_main_loop(target):
    ptx = matmul(target)
    assembled = assemble(ptx, target, "kernel")
    assert assembled.spill_stores == assembled.spill_loads == 0
    counts = loop_instructions(disassemble(assembled.cubin))
    assert counts["HMMA"] == 64 and counts["LDSM"] == 16 and counts["LDGSTS"] == 8
    assert counts["PRMT"] == 0 and counts["MOV"] <= 4
    assert sum(counts.values()) <= 150


@pytest.mark.parametrize("landing", ["late", "early", "random"])
@pytest.mark.parametrize("count", [2, 5])
@with_context
def test_result(landing, count):
    rng = np.random.default_rng(count)
    a = rng.standard_normal((count, M, K)).astype(ml_dtypes.bfloat16)
    b = rng.standard_normal((count, K, N)).astype(ml_dtypes.bfloat16)
    c = np.zeros((M, N), np.float32)
    arrays = [a.view(np.uint16), b.view(np.uint16), c, np.array([count], np.int32)]
    run(matmul("sm_80"), arrays, 4, SHARED_BYTES, landing)
    expected = (a.astype(np.float64) @ b.astype(np.float64)).sum(0)
    np.testing.assert_allclose(c, expected, rtol=1e-4, atol=1e-4)
