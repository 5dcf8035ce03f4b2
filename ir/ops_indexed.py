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


PURE = (GatherOp,)
OPS = PURE
