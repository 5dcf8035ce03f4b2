"""Proved tensor maps as data for the launcher, and their coordinates as values of the kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minitriton.ir.builder import Builder
from minitriton.ir.matrix_descriptor import operand_span
from minitriton.ir.mlir import ir
from minitriton.passes.affine import AffineAnalysis, Polynomial
from minitriton.passes.tensor_maps import MAX_BOX, MapPlan
from minitriton.passes.traversal import Value

Rebuild = Callable[[Value], Value]


def describe(
    plan: MapPlan, shape: Sequence[int], order: Sequence[int], element: ir.Type,
    analysis: AffineAnalysis,
) -> dict[str, Any]:  # fmt: skip
    """The map of tiles of `shape` as data (ir/tensor_map_specs.py); order: dims, fastest first."""

    def terms(value: Polynomial) -> list[Any]:
        return [
            [c, [analysis.argument(a) for a in monomial]]
            for monomial, c in sorted(value.terms.items())
        ]

    size = element.width // 8
    span = operand_span(tuple(shape), tuple(order), size)
    box = [
        1 if d.tile_dim is None
        else span // size if d.tile_dim == order[0]
        else _box_extent(shape[d.tile_dim])
        for d in plan.dims
    ]  # fmt: skip
    return {
        "base": plan.base,
        "offset": terms(plan.offset),
        "strides": [terms(d.stride) for d in plan.dims[1:]],
        "sizes": [None if d.size is None else terms(d.size) for d in plan.dims],
        "spans": plan.dims[-1].spans,
        "signed": plan.signed,
        "box": box,
        "swizzle": span,
        "element_bytes": size,
        "element": str(element),
        "non_negative": sorted(plan.non_negative),
        "fill": plan.fill,
    }


def _box_extent(size: int) -> int:
    """The largest part of a dimension that a box can have, with equal parts."""
    return next(extent for extent in range(min(size, MAX_BOX), 0, -1) if size % extent == 0)


def evaluate(
    value: Polynomial, analysis: AffineAnalysis, rebuild: Rebuild, builder: Builder
) -> Value:
    """An i32 with the value of a polynomial; `rebuild` gives its atoms as they are wanted."""
    i32 = ir.IntegerType.get_signless(32)
    total: Value | None = None
    for monomial, coefficient in sorted(value.terms.items()):
        term: Value | None = None
        for atom in monomial:
            factor = _narrow(rebuild(analysis.atoms[atom]), builder)
            term = factor if term is None else builder.op("arith.muli", i32, [term, factor])
        constant = builder.constant(i32, coefficient)
        if term is None:
            term = constant
        elif coefficient != 1:
            term = builder.op("arith.muli", i32, [term, constant])
        total = term if total is None else builder.op("arith.addi", i32, [total, term])
    return builder.constant(i32, 0) if total is None else total


def _narrow(value: Value, builder: Builder) -> Value:
    width = ir.IntegerType(value.type).width
    if width == 32:
        return value
    name = "arith.trunci" if width > 32 else "arith.extsi"
    return builder.op(name, ir.IntegerType.get_signless(32), [value])
