"""legality: what code generation could not take is refused by name, everything else passes."""

import pytest

from minitriton.ir.diagnostics import CompileError, InternalError
from minitriton.ir.mlir import ir
from minitriton.ir.target import Target
from minitriton.passes import legality
from minitriton.passes.tile_pass import PassOptions
from tests.passes import tile_kernels


def check(module):
    legality.run(module, Target.parse("sm_80"), PassOptions())


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("%x = math.cbrt %f : f32", "math.cbrt"),
        ("%x = arith.extui %a : i32 to i48", "i48"),
        ("%x = arith.index_cast %a : i32 to index", "arith.index_cast"),
        ("%x = arith.constant dense<0.0> : tensor<8xf80>", "f80"),
        ("%x = tensor.empty() : tensor<8xf32>", "tensor.empty"),
        ("scf.if %c { %x = math.cbrt %f : f32 }", "math.cbrt"),
    ],
)
def test_unknown_ops_and_types_are_refused(body, named):
    args = "%f: f32, %a: i32, %c: i1"
    module = ir.Module.parse(f"func.func @k({args}) {{\n{body}\nreturn }}")
    with pytest.raises(CompileError, match="support") as caught:
        check(module)
    assert named in str(caught.value)


def test_arguments_of_unknown_types_are_refused():
    with pytest.raises(InternalError, match="i48"):
        check(ir.Module.parse("func.func @k(%a: i48) { return }"))


def test_compiled_kernels_pass_at_every_stage(kernel):
    kern = kernel(
        tile_kernels.attention, q="*fp16", k="*fp16", v="*fp16", o="*fp32", n="i32",
        BM=64, BN=32, D=32,
    )  # fmt: skip
    check(kern.build())
    check(kern.compile())
