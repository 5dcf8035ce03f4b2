"""Integers that a loop over tiles counts up, as functions of its variable.

    before: for %t = %a to %b, %s iter_args(%c = %i) { for { ... }; %n = addi %c, %s; yield %n }
    after:  for %t = %a to %b, %s { %n = (%i - %a) + %t + %s; for { ... } }

Persistent kernels count tiles so for their stores, which ties each iteration to the last one.
Requires: no layouts. Ensures: the same values; what such a counter was for is dead.
"""

from __future__ import annotations

from minitriton.ir.builder import Builder
from minitriton.ir.mlir import ir
from minitriton.passes.affine import AffineAnalysis
from minitriton.passes.map_terms import evaluate
from minitriton.passes.traversal import Value, defining_op, kernel_of, terminator_of, walk


def replace_counters(module: ir.Module) -> None:
    """In all loops that have others inside."""
    function = kernel_of(module)
    analysis = AffineAnalysis(function.regions[0].blocks[0])
    for loop in walk(function):
        if loop.name == "scf.for" and any(op.name == "scf.for" for op in walk(loop)):
            _replace(loop, analysis)


def _replace(loop: ir.Operation, analysis: AffineAnalysis) -> None:
    body = loop.regions[0].blocks[0]
    end = terminator_of(body)
    for argument, following in zip(list(body.arguments)[1:], end.operands, strict=True):
        update, form = defining_op(following), analysis.of(argument) if _is_i32(argument) else None
        if (
            update is None
            or form is None
            or argument in map(analysis.atoms.__getitem__, form.scalar.atoms())
        ):
            continue
        builder = Builder(ir.InsertionPoint.at_block_begin(body), loop.location)
        for value, keeper in ((argument, update), (following, end)):
            form = analysis.of(value)
            assert form is not None, "scalars always have a form"
            made = evaluate(form.scalar, analysis, lambda atom: atom, builder)
            value.replace_all_uses_except(made, keeper)


def _is_i32(value: Value) -> bool:
    return isinstance(value.type, ir.IntegerType) and ir.IntegerType(value.type).width == 32
