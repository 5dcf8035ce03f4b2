"""fuse_reductions: which reductions become one, and that results stay."""

import numpy as np

from minitriton.ir.mlir import ir
from minitriton.ir.target import Target
from minitriton.passes import fuse_reductions
from minitriton.passes.tile_pass import PassOptions
from minitriton.passes.traversal import kernel_of, walk
from tests.passes import tile_kernels

V = "tensor<8xi32>"
P = "tensor<8x!mt.ptr<i32>>"
ARGS = f"%p: {P}, %m: tensor<8xi1>, %v: {V}"


def store(value):
    return f'"mt.store"(%p, {value}) : ({P}, {V}) -> ()\n'


def test_independent_reductions_are_fused(kernel, names):
    kern = kernel(tile_kernels.moments, x="*fp32", y="*fp32", n="i32", BLOCK=256)
    x = np.random.default_rng(5).standard_normal(256).astype(np.float32)
    module = kern.check([x, np.zeros(2, np.float32)], [200])
    assert names(module).count("mt.reduce") == 1


def test_dependent_reductions_are_not_fused(kernel, names):
    kern = kernel(tile_kernels.softmax, x="*fp32", y="*fp32", n="i32", BLOCK=256)
    module = kern.compile()
    assert names(module).count("mt.reduce") == 2


def test_a_use_between_two_reductions_keeps_them_apart():
    def reduce(name, operand):
        sizes = ", ".join(["1"] + ["0"] * 15)
        return f"""
        %{name} = "mt.reduce"({operand}) ({{ ^bb0(%e{name}: i32, %f{name}: i32):
            %g{name} = arith.addi %e{name}, %f{name} : i32
            "mt.yield"(%g{name}) {{operandSegmentSizes = array<i32: {sizes}>}} : (i32) -> () }})
            {{axis = 0 : i32, operandSegmentSizes = array<i32: {sizes}>,
              resultSegmentSizes = array<i32: {sizes}>}} : ({V}) -> i32
        """

    between = f'%s = "mt.splat"(%x) : (i32) -> {V}\n' + store("%s")
    after = f'%t = "mt.splat"(%y) : (i32) -> {V}\n' + store("%t")

    def fused(middle):
        module = ir.Module.parse(
            f"func.func @k({ARGS}) {{\n{reduce('x', '%v')}{middle}{reduce('y', '%v')}"
            f"{'' if middle else between}{after}return }}"
        )
        fuse_reductions.run(module, Target.parse("sm_80"), PassOptions())
        assert module.operation.verify()
        return [op.name for op in walk(kernel_of(module))].count("mt.reduce")

    assert fused("") == 1
    assert fused(between) == 2
