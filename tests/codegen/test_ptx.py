"""GPU module -> PTX: kernel directives, source lines, fusion, refusal of what would kill LLVM."""

import re

import pytest

from minitriton.codegen.lower import CodegenOptions, lower_to_gpu
from minitriton.codegen.ptx import emit_ptx
from minitriton.ir.builder import i32_attr
from minitriton.ir.diagnostics import InternalError
from minitriton.ir.layouts import blocked
from minitriton.ir.mlir import ir
from minitriton.ir.target import Target
from tests.codegen.tile_kernel import ALL_TARGETS, TileKernel, check_assembles, with_context

LAYOUT = blocked((256,), (4,), (32,), (2,), (0,))


def multiply_add(loc=None):
    kernel = TileKernel(["f32", "f32"], 2)
    x = kernel.load(0, LAYOUT)
    if loc:
        kernel.builder.loc = loc
    y = kernel.builder.op("arith.mulf", x.type, (x, x))
    y = kernel.builder.op("arith.addf", x.type, (y, x))
    kernel.store(1, y)
    kernel.builder.create("func.return", [])
    return kernel


@pytest.mark.parametrize("arch", ALL_TARGETS)
@with_context
def test_directives(arch):
    kernel = multiply_add()
    kernel.module.operation.attributes["mt.maxnreg"] = i32_attr(64)
    ptx = emit_ptx(lower_to_gpu(kernel.module, Target.parse(arch)))
    assert f".target {arch}" in ptx and ".visible .entry kernel(" in ptx
    assert ".reqntid 64" in ptx and ".maxnreg 64" in ptx
    assert "debug" not in ptx.split(".target")[1].splitlines()[0]
    check_assembles(ptx, arch)


@with_context
def test_fusion_is_an_option():
    fused = emit_ptx(lower_to_gpu(multiply_add().module, Target.parse("sm_80")))
    assert "fma.rn.f32" in fused
    options = CodegenOptions(enable_fp_fusion=False)
    exact = emit_ptx(lower_to_gpu(multiply_add().module, Target.parse("sm_80"), options))
    assert "fma" not in exact and "mul.rn.f32" in exact and "add.rn.f32" in exact


@with_context
def test_source_lines():
    callee = ir.Location.file("lib.py", 3, 5)
    loc = ir.Location.callsite(callee, [ir.Location.file("kernel.py", 14, 9)])
    ptx = emit_ptx(lower_to_gpu(multiply_add(loc).module, Target.parse("sm_80")))
    files = dict(re.findall(r'\.file\s+(\d+)\s+"([^"]+)"', ptx))
    number = next(n for n, name in files.items() if name.endswith("lib.py"))
    assert re.search(rf"\.loc\s+{number} 3 5", ptx)


@with_context
def test_an_op_without_a_rule_is_named():
    kernel = TileKernel(["f32"], 2)
    value = kernel.load(0, LAYOUT)
    kernel.builder.loc = ir.Location.file("kernel.py", 7, 1)
    kernel.builder.op("math.cbrt", value.type, (value,))
    kernel.builder.create("func.return", [])
    with pytest.raises(InternalError, match=r"math\.cbrt.*kernel\.py"):
        lower_to_gpu(kernel.module, kernel.target)


@with_context
def test_ops_that_end_the_process_are_refused():
    module = ir.Module.parse(
        "gpu.module @k { llvm.func @k(%x: f32) { %y = math.exp %x : f32  llvm.return } }"
    )
    with pytest.raises(InternalError, match=r"math\.exp"):
        emit_ptx(module)


@with_context
def test_a_module_that_llvm_rejects_is_an_internal_error():
    module = ir.Module.parse(
        'module attributes {gpu.container_module} { gpu.module @k [#nvvm.target<chip = "sm_80">] '
        "{ llvm.func @k(%x: f32, %p: !llvm.ptr<1>) { %y = math.cbrt %x : f32  "
        "llvm.store %y, %p {alignment = 4 : i64} : f32, !llvm.ptr<1>  llvm.return } } }"
    )
    with pytest.raises(InternalError):
        emit_ptx(module)
