"""Refuses ops and types that code generation cannot take, before they reach LLVM.

Some malformed inputs end the process inside LLVM, so nothing unknown may get there. Changes
nothing; CompileError names the op and its source line.
"""

from __future__ import annotations

from minitriton.ir.context import op_names
from minitriton.ir.diagnostics import CompileError, Diagnostic, InternalError
from minitriton.ir.dialect import MemType, PtrType, element_of
from minitriton.ir.mlir import ir
from minitriton.ir.target import Target
from minitriton.passes.source_span import span_of
from minitriton.passes.tile_pass import PassOptions
from minitriton.passes.traversal import kernel_of, walk

ARITH = frozenset((
    "addf", "addi", "andi", "bitcast", "cmpf", "cmpi", "constant", "divf", "divsi", "divui",
    "extf", "extsi", "extui", "fptosi", "fptoui", "maximumf", "maxnumf", "maxsi", "maxui",
    "minimumf", "minnumf", "minsi", "minui", "mulf", "muli", "negf", "ori", "remf", "remsi",
    "remui", "select", "shli", "shrsi", "shrui", "sitofp", "subf", "subi", "truncf", "trunci",
    "uitofp", "xori",
))  # fmt: skip
MATH = frozenset((
    "absf", "absi", "ceil", "cos", "erf", "exp", "exp2", "floor", "fma", "log", "log2", "rsqrt",
    "sin", "sqrt", "tanh",
))  # fmt: skip
CONTROL = frozenset(("scf.for", "scf.if", "scf.while", "scf.yield", "scf.condition", "func.return"))
INTEGER_WIDTHS = frozenset((1, 8, 16, 32, 64))
FLOATS = (
    ir.F16Type, ir.BF16Type, ir.F32Type, ir.F64Type, ir.Float8E5M2Type, ir.Float8E4M3FNType,
)  # fmt: skip


def run(module: ir.Module, target: Target, options: PassOptions) -> None:
    """Checks every op and value of the kernel."""
    function = kernel_of(module)
    for argument in function.regions[0].blocks[0].arguments:
        if not _legal_type(argument.type):
            raise InternalError("legality", f"argument of type {argument.type}")
    known = op_names()
    for op in walk(function):
        if not _legal_name(op.name, known):
            raise _refused(op, f"'{op.name}' is not supported by the code generator")
        for result in op.results:
            if not _legal_type(result.type):
                raise _refused(op, f"'{op.name}' makes a value of unsupported type {result.type}")


def _legal_name(name: str, known: frozenset[str]) -> bool:
    dialect, _, op = name.partition(".")
    if dialect == "arith":
        return op in ARITH
    if dialect == "math":
        return op in MATH
    return name in known or name in CONTROL


def _legal_type(type_: ir.Type) -> bool:
    if isinstance(type_, MemType):
        return _legal_element(type_.tensor_type.element_type)
    return _legal_element(element_of(type_))


def _legal_element(element: ir.Type) -> bool:
    if isinstance(element, PtrType):
        return _legal_element(element.pointee)
    if isinstance(element, ir.IntegerType):
        return element.width in INTEGER_WIDTHS and element.is_signless
    return isinstance(element, FLOATS)


def _refused(op: ir.Operation, reason: str) -> CompileError:
    return CompileError(Diagnostic(reason, span_of(op.location), "here"))
