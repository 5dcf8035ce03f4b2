"""fuse_reductions: which reductions become one, and that results stay."""

import numpy as np
import pytest

from minitriton.ir.mlir import ir
from minitriton.ir.target import Target
from minitriton.passes import fuse_reductions
from minitriton.passes.tile_pass import PassOptions
from minitriton.passes.traversal import kernel_of
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


def reduce(name, operand):
    sizes = ", ".join(["1"] + ["0"] * 15)
    return f"""
    %{name} = "mt.reduce"({operand}) ({{ ^bb0(%e{name}: i32, %f{name}: i32):
        %g{name} = arith.addi %e{name}, %f{name} : i32
        "mt.yield"(%g{name}) {{operandSegmentSizes = array<i32: {sizes}>}} : (i32) -> () }})
        {{axis = 0 : i32, operandSegmentSizes = array<i32: {sizes}>,
          resultSegmentSizes = array<i32: {sizes}>}} : ({V}) -> i32
    """


SPLAT = f'%s = "mt.splat"(%x) : (i32) -> {V}\n'
DOUBLED = f"%w = arith.addi %v, %v : {V}\n"
SHIFTED = f"%w = arith.addi %v, %s : {V}\n"
LOADED = f'%w = "mt.load"(%p) {{operandSegmentSizes = array<i32: 1, 0, 0>}} : ({P}) -> {V}\n'


@pytest.mark.parametrize(
    ("between", "operand", "names"),
    [
        ("", "%v", "reduce splat store splat store"),
        (SPLAT + store("%s"), "%v", "reduce splat store splat store"),
        (SPLAT + store("%s") + DOUBLED, "%w", "addi reduce splat store splat store"),
        (SPLAT + store("%s") + LOADED, "%w", "reduce splat store load reduce splat store"),
        (SPLAT + store("%s") + SHIFTED, "%w", "reduce splat store addi reduce splat store"),
    ],
)
def test_what_the_second_reduces_is_computed_first_if_it_can_be(between, operand, names):
    """It cannot where it is loaded in between, or depends on the first result."""
    after = "" if between else SPLAT + store("%s")
    after += f'%t = "mt.splat"(%y) : (i32) -> {V}\n' + store("%t")
    body = reduce("x", "%v") + between + reduce("y", operand) + after
    module = ir.Module.parse(f"func.func @k({ARGS}) {{\n{body}return }}")
    fuse_reductions.run(module, Target.parse("sm_80"), PassOptions())
    assert module.operation.verify()
    found = [op.name.split(".")[1] for op in kernel_of(module).regions[0].blocks[0].operations]
    assert " ".join(found[:-1]) == names
