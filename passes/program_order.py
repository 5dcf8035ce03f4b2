"""The order of programs of different lengths: the longest first, so that short ones fill the end.

    before: %p = program_id     after: %q = num_programs - 1 - program_id

The GPU starts CTAs in the order of their numbers. Done where the iterations of a kernel's loops
grow with the number of the program, as for a causal mask; programs do not depend on each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from minitriton.ir.builder import Builder, i32_attr
from minitriton.ir.mlir import ir
from minitriton.passes.affine import ZERO, AffineAnalysis
from minitriton.passes.traversal import defining_op, int_attribute, walk


def heaviest_first(function: ir.Operation, loops: Sequence[ir.Operation]) -> list[int]:
    """Turns the order of programs round along the axes along which they get longer; these axes."""
    if any(loop.parent.operation.name == "scf.for" for loop in loops):
        return []
    analysis = AffineAnalysis(function.regions[0].blocks[0])
    iterations = ZERO
    for loop in loops:
        lower, upper = (analysis.of(value) for value in list(loop.operands)[:2])
        if lower is None or upper is None:
            return []
        iterations = iterations + upper.scalar - lower.scalar
    growing: set[int] = set()
    other: set[int] = set()
    for monomial, coefficient in iterations.terms.items():
        for atom in monomial:
            op = defining_op(analysis.atoms[atom])
            if op is not None and op.name == "mt.program_id":
                alone = len(monomial) == 1 and coefficient > 0
                (growing if alone else other).add(int_attribute(op, "axis"))
    axes = sorted(growing - other)
    for op in [op for op in walk(function) if op.name == "mt.program_id"]:
        if int_attribute(op, "axis") in axes:
            _reverse(op)
    return axes


def _reverse(op: ir.Operation) -> None:
    builder = Builder(ir.InsertionPoint(op), op.location)
    i32 = op.results[0].type
    axis = {"axis": i32_attr(int_attribute(op, "axis"))}
    count = builder.op("mt.num_programs", i32, (), axis)
    number = builder.op("mt.program_id", i32, (), axis)
    last = builder.op("arith.subi", i32, [count, builder.constant(i32, 1)])
    op.results[0].replace_all_uses_with(builder.op("arith.subi", i32, [last, number]))
    op.erase()
