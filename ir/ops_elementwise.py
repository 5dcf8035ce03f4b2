"""Ops that compute several results element by element: what a kernel's author wrote, in PTX or as
a function of scalars, and unpacking."""

from collections.abc import Sequence
from typing import Any

from minitriton.ir.asm_operands import parse_constraints, registers_of
from minitriton.ir.dialect import MT, check, element_of, separate, shape_of, verifier
from minitriton.ir.mlir import ext, ir
from minitriton.ir.types import bit_width

Operand, Result, Region = ext.Operand, ext.Result, ext.Region


def _annotations(**attributes: Any) -> dict[str, Any]:
    return (
        separate("value", Sequence[Operand[Any]])
        | attributes
        | separate("result", Sequence[Result[Any]])
    )


def _same_shapes(op: Any) -> tuple[bool, str]:
    shapes = {shape_of(value.type) for value in (*op.operands, *op.results)}
    return len(shapes) == 1, "operands and results differ in shape"


def _verify_asm(op: Any) -> bool:
    pack = ir.IntegerAttr(op.attributes["pack"]).value
    try:
        found = parse_constraints(ir.StringAttr(op.attributes["constraints"]).value)
        needed = [
            len(registers_of([bit_width(element_of(v.type)) for v in values], pack))
            for values in (op.results, op.operands)
        ]
    except ValueError as error:
        return check(op, (False, str(error)))
    counts = [len(found.results), len(found.operands)]
    return check(op, _same_shapes(op), (counts == needed, "constraints do not fit the values"))


class ElementwiseAsmOp(MT.Operation, name="elementwise_asm"):
    """Inline PTX `asm` on `pack` elements of each operand at a time (see asm_operands), for tiles
    of one shape or for scalars; its results depend on its operands only."""

    __annotations__ = _annotations(
        asm=ir.StringAttr, constraints=ir.StringAttr, pack=ir.IntegerAttr
    )
    verify_invariants = verifier(_verify_asm)


class EffectfulAsmOp(MT.Operation, name="effectful_asm"):
    """The same for PTX that may do anything to global memory, or gives another result each time:
    every element is processed at least once, in the program's order."""

    __annotations__ = _annotations(
        asm=ir.StringAttr, constraints=ir.StringAttr, pack=ir.IntegerAttr
    )
    verify_invariants = verifier(_verify_asm)


class MapElementwiseOp(MT.Operation, name="map_elementwise"):
    """Runs the region on `pack` elements of each operand tile at a time: scalars (a0, a1, ..., b0,
    b1, ...) -> yield of as many for each result, in the same order. The region has no effects."""

    __annotations__ = _annotations(body=Region, pack=ir.IntegerAttr)

    @verifier
    def verify_invariants(op: Any) -> bool:
        block, pack = op.regions[0].blocks[0], ir.IntegerAttr(op.attributes["pack"]).value
        taken = [element_of(v.type) for v in op.operands for _ in range(pack)]
        given = [element_of(v.type) for v in op.results for _ in range(pack)]
        yielded = list(block.operations)[-1].operation.operands
        return check(
            op,
            _same_shapes(op),
            ([a.type for a in block.arguments] == taken, "the region takes other elements"),
            ([v.type for v in yielded] == given, "the region yields other elements"),
        )


class UnpackE2M1Op(MT.Operation, name="unpack_e2m1"):
    """The numbers that the low and the high halves of bytes are in E2M1 (fp4: sign, two bits of
    exponent, one of mantissa), in bf16 or f16: two tiles of the shape of the first."""

    value: Operand[Any]
    low: Result[Any]
    high: Result[Any]

    @verifier
    def verify_invariants(op: Any) -> bool:
        low, high = (value.type for value in op.results)
        return check(
            op,
            _same_shapes(op),
            (low == high, "results differ in type"),
            (bit_width(element_of(op.operands[0].type)) == 8, "the operand is not of bytes"),
        )


PURE = (ElementwiseAsmOp, MapElementwiseOp, UnpackE2M1Op)
OPS = (*PURE, EffectfulAsmOp)
