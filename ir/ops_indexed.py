"""Ops on tiles whose elements say where others come from or go to."""

from typing import Any

from minitriton.ir.dialect import MT, check, element_of, shape_of, verifier
from minitriton.ir.mlir import ext, ir

Operand, Result = ext.Operand, ext.Result


class GatherOp(MT.Operation, name="gather"):
    """Along `axis` the elements of `source` that `index` (i32) names, in the shape of `index`.

    An index outside of 0 .. size - 1 is undefined behaviour.
    """

    source: Operand[Any]
    index: Operand[Any]
    axis: ir.IntegerAttr
    result: Result[Any]

    @verifier
    def verify_invariants(op: Any) -> bool:
        source, index = (v.type for v in op.operands)
        result, axis = op.results[0].type, ir.IntegerAttr(op.attributes["axis"]).value
        whole, wanted = shape_of(source), shape_of(index)
        if whole is None or wanted is None or not 0 <= axis < len(whole) == len(wanted):
            return check(
                op, (False, f"{source} and {index} are no tiles of one rank with the axis")
            )
        others = whole[:axis] + wanted[axis : axis + 1] + whole[axis + 1 :]
        i32 = ir.IntegerType.get_signless(32)
        return check(
            op,
            (others == wanted, f"{index} differs from {source} in another dimension than {axis}"),
            (element_of(index) == i32, f"{index} is not of i32"),
            (shape_of(result) == wanted, f"{result} has not the shape of {index}"),
            (
                element_of(result) == element_of(source),
                f"{result} has not the elements of {source}",
            ),
        )


class HistogramOp(MT.Operation, name="histogram"):
    """How often each of 0 .. size - 1 is in a tile of i32, where `mask`; there no other may be."""

    value: Operand[Any]
    mask: Operand[Any]
    result: Result[Any]

    @verifier
    def verify_invariants(op: Any) -> bool:
        value, mask = (v.type for v in op.operands)
        result, i32 = op.results[0].type, ir.IntegerType.get_signless(32)
        bits = ir.IntegerType.get_signless(1)
        return check(
            op,
            (shape_of(value) is not None, f"{value} is no tile"),
            (shape_of(mask) == shape_of(value), f"{mask} has not the shape of {value}"),
            (element_of(value) == i32 and element_of(mask) == bits, f"{value}, {mask}: i32 and i1"),
            (len(shape_of(result) or ()) == 1, f"{result} is no tile of rank 1"),
            (element_of(result) == i32, f"{result} is not of i32"),
        )


PURE = (GatherOp, HistogramOp)
OPS = PURE
