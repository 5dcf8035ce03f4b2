"""Checks the layout laws that code generation relies on (the list is in CONTRACT and below).

Changes nothing; InternalError names the first op that breaks a law. A pass in check mode.
"""

from __future__ import annotations

from collections.abc import Callable

from minitriton.ir.axis import is_separable
from minitriton.ir.diagnostics import InternalError
from minitriton.ir.dialect import shape_of
from minitriton.ir.encoding import layout_of
from minitriton.ir.fma_layout import fma_operand
from minitriton.ir.linear_layout import LinearLayout
from minitriton.ir.mlir import ir
from minitriton.ir.reduction import is_scannable
from minitriton.ir.register_maps import narrowed
from minitriton.ir.target import Target
from minitriton.passes.dot_layouts import mma_element_bits, mma_plan
from minitriton.passes.layout_choice import preimage
from minitriton.passes.op_classes import is_tile, keeps_elements
from minitriton.passes.tile_pass import PassOptions
from minitriton.passes.traversal import (
    Value,
    int_array,
    int_attribute,
    kernel_of,
    terminator_of,
    walk,
)


def run(module: ir.Module, target: Target, options: PassOptions) -> None:
    """The check as a pass."""
    verify_layouts(module)


def verify_layouts(module: ir.Module) -> None:
    """InternalError for the first op whose tiles break a layout law."""
    num_warps = int_attribute(module.operation, "mt.num_warps", 4)
    for op in walk(kernel_of(module)):
        tiles = [v for v in (*op.operands, *op.results) if is_tile(v)]
        if not tiles:
            continue
        for value in tiles:
            if value.type.encoding is None:
                raise _broken(op, f"{value.type} has no layout")
            layout = layout_of(value.type)
            if layout.num_lanes != 32 or layout.num_warps != num_warps:
                raise _broken(op, f"{layout} is not for {num_warps} warps of 32 lanes")
            if not layout.is_surjective:
                raise _broken(op, f"{layout} leaves elements out")
        law = LAWS.get(op.name)
        problem = law(op) if law else _uniform(op) if _must_agree(op.name) else None
        if problem:
            raise _broken(op, problem)


def _broken(op: ir.Operation, problem: str) -> InternalError:
    return InternalError("verify_layouts", f"{op.name} at {op.location}: {problem}")


def _must_agree(name: str) -> bool:
    return keeps_elements(name) or name in (
        "mt.load", "mt.store", "mt.atomic_rmw", "mt.atomic_cas", "mt.assert",
    )  # fmt: skip


def _layouts(values: list[Value]) -> list[LinearLayout]:
    return [layout_of(v.type) for v in values if is_tile(v)]


def _uniform(op: ir.Operation) -> str | None:
    found = set(_layouts([*op.operands, *op.results]))
    return None if len(found) <= 1 else "operands and results differ in layout"


def _shape_change(op: ir.Operation) -> str | None:
    source, result = _layouts([op.operands[0], op.results[0]])
    same = preimage(op, result) == source
    return None if same else f"operand {source} does not become {result}"


def _expand(op: ir.Operation) -> str | None:
    source, result = _layouts([op.operands[0], op.results[0]])
    same = source.expand_dims(int_attribute(op, "axis")) == result
    return None if same else f"operand {source} does not become {result}"


def _joined(op: ir.Operation) -> str | None:
    lhs, rhs, result = _layouts([*op.operands, *op.results])
    image = lhs.join() if op.name == "mt.join" else lhs.cat(int_attribute(op, "axis"))
    return None if lhs == rhs and image == result else f"{lhs} and {rhs} do not become {result}"


def _narrow(op: ir.Operation) -> str | None:
    source, result = _layouts([op.operands[0], op.results[0]])
    axis = int_attribute(op, "axis")
    same = narrowed(source, axis, result.shape[axis]) == result
    return None if same else f"a part of {source} is not {result}"


def _split(op: ir.Operation) -> str | None:
    source, lhs, rhs = _layouts([*op.operands, *op.results])
    fits = source.can_split() and source.split() == lhs == rhs
    return None if fits else f"{source} does not split into {lhs} and {rhs}"


def _reduce(op: ir.Operation) -> str | None:
    sources, axis = _layouts(list(op.operands)), int_attribute(op, "axis")
    if len(set(sources)) != 1:
        return "operands differ in layout"
    if not is_separable(sources[0], axis):
        return f"{sources[0]} mixes dimension {axis} with others"
    expected = sources[0].slice(axis)
    wrong = any(layout != expected for layout in _layouts(list(op.results)))
    return f"results are not in {expected}" if wrong else None


def _scan(op: ir.Operation) -> str | None:
    if not is_scannable(layout_of(op.operands[0].type), int_attribute(op, "axis")):
        return "the operand's layout cannot be scanned"
    return _uniform(op)


def _gather(op: ir.Operation) -> str | None:
    _, index, result = _layouts([*op.operands, *op.results])
    return None if index == result else "indices and result differ in layout"


def _histogram(op: ir.Operation) -> str | None:
    value, mask, _ = _layouts([*op.operands, *op.results])
    return None if value == mask else "values and mask differ in layout"


def _dot(op: ir.Operation) -> str | None:
    a, b, c, result = _layouts([*op.operands, *op.results])
    if c != result:
        return "accumulator and result differ in layout"
    if "mt.fma" in op.attributes:
        k = a.shape[-1]
        wrong = a != fma_operand(c, 0, k) or b != fma_operand(c, 1, k)
    else:
        bits = mma_element_bits(op)
        assert bits is not None, "a dot without mt.fma has an instruction"
        plan = mma_plan(op, tuple(int_array(op, "mt.warps")), bits)
        wrong = (a, b, c) != (plan.a, plan.b, plan.c)
    return "operands are not in the dot's layouts" if wrong else None


def _carried(*groups: list[Value]) -> str | None:
    for values in zip(*groups, strict=True):
        if len({v.type for v in values}) != 1:
            return f"a carried value changes type: {[str(v.type) for v in values]}"
    return None


def _for(op: ir.Operation) -> str | None:
    body = op.regions[0].blocks[0]
    yielded = list(terminator_of(body).operands)
    return _carried(list(op.operands)[3:], list(body.arguments)[1:], yielded, list(op.results))


def _if(op: ir.Operation) -> str | None:
    ends = [list(terminator_of(r.blocks[0]).operands) for r in op.regions if len(r.blocks)]
    return _carried(list(op.results), *ends) if len(op.results) else None


def _convert(op: ir.Operation) -> str | None:
    same = shape_of(op.operands[0].type) == shape_of(op.results[0].type)
    return None if same else "the shape changes"


LAWS: dict[str, Callable[[ir.Operation], str | None]] = {
    "mt.expand_dims": _expand,
    "mt.broadcast": _shape_change,
    "mt.trans": _shape_change,
    "mt.reshape": _shape_change,
    "mt.join": _joined,
    "mt.cat": _joined,
    "mt.flip_blocks": _uniform,
    "mt.narrow": _narrow,
    "mt.split": _split,
    "mt.reduce": _reduce,
    "mt.scan": _scan,
    "mt.gather": _gather,
    "mt.histogram": _histogram,
    "mt.dot": _dot,
    "mt.convert_layout": _convert,
    "scf.for": _for,
    "scf.if": _if,
}
