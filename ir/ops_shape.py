"""Ops that create tiles or rearrange their elements without computing."""

from math import prod
from typing import Any

from minitriton.ir.dialect import MT, check, element_of, shape_of, verifier
from minitriton.ir.mlir import ext, ir

Operand, Result = ext.Operand, ext.Result


class MakeRangeOp(MT.Operation, name="make_range"):
    """start, start+1, ..., end-1 as a rank-1 tile of i32."""

    start: ir.IntegerAttr
    end: ir.IntegerAttr
    result: Result[Any]


def _is_tile_of(op: Any, tile: Any, scalar: Any, what: str) -> bool:
    return check(
        op,
        (shape_of(tile) is not None, f"{what} must be a tile"),
        (element_of(tile) == scalar, f"element of {tile} is not {scalar}"),
    )


class SplatOp(MT.Operation, name="splat"):
    """A tile with every element equal to the scalar operand."""

    value: Operand[Any]
    result: Result[Any]

    @verifier
    def verify_invariants(op: Any) -> bool:
        return _is_tile_of(op, op.results[0].type, op.operands[0].type, "result")


class UnsplatOp(MT.Operation, name="unsplat"):
    """The value of a tile whose elements are all equal: every thread takes one that it holds."""

    value: Operand[Any]
    result: Result[Any]

    @verifier
    def verify_invariants(op: Any) -> bool:
        return _is_tile_of(op, op.operands[0].type, op.results[0].type, "operand")


class ExpandDimsOp(MT.Operation, name="expand_dims"):
    """Inserts a dimension of size 1 at `axis`."""

    value: Operand[Any]
    axis: ir.IntegerAttr
    result: Result[Any]

    @verifier
    def verify_invariants(op: Any) -> bool:
        source, result = shape_of(op.operands[0].type), shape_of(op.results[0].type)
        axis = ir.IntegerAttr(op.attributes["axis"]).value
        expected = source[:axis] + (1,) + source[axis:] if source is not None else None
        return check(op, (result == expected, f"shape {result}, expected {expected}"))


class BroadcastOp(MT.Operation, name="broadcast"):
    """Repeats dimensions of size 1; the rank does not change."""

    value: Operand[Any]
    result: Result[Any]

    @verifier
    def verify_invariants(op: Any) -> bool:
        source, result = shape_of(op.operands[0].type), shape_of(op.results[0].type)
        fits = (
            source is not None
            and result is not None
            and len(source) == len(result)
            and all(a in (1, b) for a, b in zip(source, result, strict=True))
        )
        return check(op, (fits, f"cannot broadcast {source} to {result}"))


class ReshapeOp(MT.Operation, name="reshape"):
    """Same elements in C order under another shape."""

    value: Operand[Any]
    result: Result[Any]

    @verifier
    def verify_invariants(op: Any) -> bool:
        source, result = shape_of(op.operands[0].type), shape_of(op.results[0].type)
        same = prod(source or ()) == prod(result or ())
        return check(op, (same, f"{source} and {result} differ in number of elements"))


class TransOp(MT.Operation, name="trans"):
    """Permutes dimensions: result dimension i is operand dimension order[i] (array<i32>)."""

    value: Operand[Any]
    order: Any = ext.attribute()
    result: Result[Any] = ext.result()


class JoinOp(MT.Operation, name="join"):
    """Two tiles of one type stacked along a new last dimension of size 2."""

    lhs: Operand[Any]
    rhs: Operand[Any]
    result: Result[Any]


class SplitOp(MT.Operation, name="split"):
    """The inverse of join: the halves of a last dimension of size 2."""

    value: Operand[Any]
    lhs: Result[Any]
    rhs: Result[Any]


class CatOp(MT.Operation, name="cat"):
    """Concatenation of two tiles of one type along `axis`, in order."""

    lhs: Operand[Any]
    rhs: Operand[Any]
    axis: ir.IntegerAttr
    result: Result[Any]


class FlipBlocksOp(MT.Operation, name="flip_blocks"):
    """The blocks of a granule (ir/ragged.py) along `axis` last to first, each as it is."""

    value: Operand[Any]
    axis: ir.IntegerAttr
    result: Result[Any]

    @verifier
    def verify_invariants(op: Any) -> bool:
        source, result = op.operands[0].type, op.results[0].type
        return check(op, (source == result, f"{source} cannot become {result}"))


class NarrowOp(MT.Operation, name="narrow"):
    """The elements at `start` and on along `axis`, as many as the result has: a multiple of that
    number is `start`."""

    value: Operand[Any]
    axis: ir.IntegerAttr
    start: ir.IntegerAttr
    result: Result[Any]

    @verifier
    def verify_invariants(op: Any) -> bool:
        source, result = shape_of(op.operands[0].type), shape_of(op.results[0].type)
        axis, start = (ir.IntegerAttr(op.attributes[name]).value for name in ("axis", "start"))
        if source is None or result is None or not 0 <= axis < len(source) == len(result):
            return check(op, (False, "needs a tile of the operand's rank"))
        size = result[axis]
        others = source[:axis] + (size,) + source[axis + 1 :]
        inside = 0 <= start <= source[axis] - size and start % size == 0
        return check(
            op,
            (others == result, f"{result} is not {source} with another dimension {axis}"),
            (inside, f"{start} is no multiple of {size} inside {source}"),
        )


class ConvertLayoutOp(MT.Operation, name="convert_layout"):
    """The same tile in another layout."""

    value: Operand[Any]
    result: Result[Any]


PURE = (
    MakeRangeOp, SplatOp, UnsplatOp, ExpandDimsOp, BroadcastOp, ReshapeOp, TransOp, JoinOp, SplitOp,
    CatOp, FlipBlocksOp, NarrowOp, ConvertLayoutOp,
)  # fmt: skip
OPS = PURE
