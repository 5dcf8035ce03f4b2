"""GPU module -> PTX text through the upstream lowering passes and LLVM's NVPTX backend."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from minitriton.ir.diagnostics import InternalError
from minitriton.ir.mlir import PROVIDER, ir, passmanager

PIPELINE = (
    # LLVM simplifies on its own; canonicalize is quadratic in the loop-carried values of a scf.for
    "builtin.module("
    "convert-scf-to-cf,"
    # without convert-nvvm-to-llvm some nvvm ops reach LLVM half lowered
    "gpu.module(convert-to-llvm,convert-nvvm-to-llvm),"
    "reconcile-unrealized-casts,"
    # line tables only: `.loc` without making the PTX a debug build
    "ensure-debug-info-scope-on-llvm-func{emission-kind=DebugDirectivesOnly},"
    "gpu-module-to-binary{format=isa})"
)
# LLVM ends the process on these, so they must never get that far
_FATAL = frozenset(f"math.{name}" for name in ("exp", "log", "log2", "sin", "cos", "tanh", "erf"))


@functools.cache
def _gpu() -> Any:
    return importlib.import_module(f"{PROVIDER}.dialects.gpu")


@functools.cache
def _manager() -> passmanager.PassManager:
    manager = passmanager.PassManager.parse(PIPELINE)
    manager.enable_verifier(False)  # what upstream passes make is verified by LLVM
    return manager


def emit_ptx(module: ir.Module) -> str:
    """PTX of a module made by `lower_to_gpu`, which is consumed. InternalError if it fails."""
    _refuse_fatal(module.operation)
    try:
        module.operation.verify()
        _manager().run(module.operation)
    except ir.MLIRError as error:
        raise InternalError("codegen", str(error)) from error
    for op in module.body.operations:
        if op.operation.name == "gpu.binary":
            objects = ir.ArrayAttr(op.operation.attributes["objects"])
            return _gpu().ObjectAttr(objects[0]).object.decode().rstrip("\0")
    raise InternalError("codegen", "no PTX came out of gpu-module-to-binary")


def _refuse_fatal(top: ir.Operation) -> None:
    found: list[str] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name in _FATAL:
            found.append(f"{op.name} was left for LLVM at {op.location}")
            return ir.WalkResult.INTERRUPT
        return ir.WalkResult.ADVANCE

    top.walk(visit)
    if found:
        raise InternalError("codegen", found[0])
