"""Ops that compute and that upstream `arith` and `math` lack."""

from collections.abc import Sequence
from typing import Any

from minitriton.ir.dialect import MT, check, separate, shape_of, verifier
from minitriton.ir.mlir import ext, ir

Operand, Result, Region = ext.Operand, ext.Result, ext.Region


class AddPtrOp(MT.Operation, name="addptr"):
    """Pointer plus a signed offset in elements (any integer width), scalar or tile."""

    pointer: Operand[Any]
    offset: Operand[Any]
    result: Result[Any]

    @verifier
    def verify_invariants(op: Any) -> bool:
        pointer, offset = (v.type for v in op.operands)
        return check(
            op,
            (op.results[0].type == pointer, "result and pointer differ in type"),
            (shape_of(pointer) == shape_of(offset), "pointer and offset differ in shape"),
        )


class PtrToIntOp(MT.Operation, name="ptr_to_int"):
    """Address as i64."""

    value: Operand[Any]
    result: Result[Any]


class IntToPtrOp(MT.Operation, name="int_to_ptr"):
    """Pointer from an i64 address."""

    value: Operand[Any]
    result: Result[Any]


class PtrCastOp(MT.Operation, name="ptr_cast"):
    """The same address with another pointee type."""

    value: Operand[Any]
    result: Result[Any]


class FpCastOp(MT.Operation, name="fp_cast"):
    """Float to float where arith.extf/truncf do not reach: fp8 on a side, or `rounding` = "rtz".

    `rounding` is "rtne" or "rtz"; a cast to fp8 saturates to the largest finite value.
    """

    value: Operand[Any]
    rounding: ir.StringAttr
    result: Result[Any]


class MulHiOp(MT.Operation, name="mulhi"):
    """Upper half of the unsigned product of two i32 or i64."""

    lhs: Operand[Any]
    rhs: Operand[Any]
    result: Result[Any]


class TanhApproxOp(MT.Operation, name="tanh_approx"):
    """Hyperbolic tangent of f32 by one instruction, relative error at most 2^-11."""

    value: Operand[Any]
    result: Result[Any]


class PreciseOp(MT.Operation, name="precise"):
    """IEEE round-to-nearest form of `function`: "div" (two operands) or "sqrt" (one); f32."""

    values: Sequence[Operand[Any]]
    function: ir.StringAttr = ext.attribute(kw_only=True)
    result: Result[Any] = ext.result(kw_only=True)


class DotOp(MT.Operation, name="dot"):
    """c + a @ b on tiles of rank 2 ([M,K] [K,N] [M,N]) or rank 3 with a leading batch.

    `input_precision`: "tf32", "tf32x3", "bf16x3", "bf16x6", "ieee" (for f32 operands only);
    `max_imprecise` i32: longest chain of fp8 products summed in the tensor core (0: no limit).
    """

    a: Operand[Any]
    b: Operand[Any]
    c: Operand[Any]
    input_precision: ir.StringAttr
    max_imprecise: ir.IntegerAttr
    result: Result[Any]

    @verifier
    def verify_invariants(op: Any) -> bool:
        a, b, c = (v.type for v in op.operands)
        left, right, accumulator = shape_of(a), shape_of(b), shape_of(c)
        if left is None or right is None or accumulator is None:
            return check(op, (False, f"operands are not all tiles: {a}, {b}, {c}"))
        return check(
            op,
            (right[-2] == left[-1], f"inner dimensions differ: {a} and {b}"),
            (accumulator[-2:] == (left[-2], right[-1]), f"accumulator {c} does not fit {a} @ {b}"),
            (op.results[0].type == c, "result and accumulator differ in type"),
        )


class WarpgroupDotOp(MT.Operation, name="warpgroup_dot"):
    """c + a @ b by wgmma: b (and a, unless it is a tile) is a buffer that other threads filled.

    With the unit attribute `mt.in_flight` the products run on: the result may only be the
    accumulator of the next warpgroup_dot until a warpgroup_result takes it, and a must not change.
    Else they are done. fp32 is multiplied as tf32: a tile is rounded to that, a buffer must be.
    With `mt.adjacent_rows` threads load a from its buffer, after all products before this dot.
    """

    a: Operand[Any]
    b: Operand[Any]
    c: Operand[Any]
    result: Result[Any]

    @verifier
    def verify_invariants(op: Any) -> bool:
        return check(
            op, (op.results[0].type == op.operands[2].type, "result and accumulator differ in type")
        )


class WarpgroupResultOp(MT.Operation, name="warpgroup_result"):
    """An accumulator that is done once at most `pending` warpgroup_dots are in flight."""

    value: Operand[Any]
    pending: ir.IntegerAttr
    result: Result[Any]


class ReduceOp(MT.Operation, name="reduce"):
    """Folds tiles of equal shape along `axis` with the region: scalars (a..., b...) -> yield.

    Results are tiles without that dimension, scalars where the operands have rank 1.
    """

    __annotations__ = (
        separate("value", Sequence[Operand[Any]])
        | {"combine": Region, "axis": ir.IntegerAttr}
        | separate("result", Sequence[Result[Any]])
    )


class ScanOp(MT.Operation, name="scan"):
    """Inclusive prefix fold along `axis`, from the far end if `reverse`; region as in reduce."""

    __annotations__ = (
        separate("value", Sequence[Operand[Any]])
        | {"combine": Region, "axis": ir.IntegerAttr, "reverse": Any}
        | separate("result", Sequence[Result[Any]])
    )


class YieldOp(MT.Operation, name="yield", traits=[ir.IsTerminatorTrait]):
    """Ends the region of reduce and scan."""

    __annotations__ = separate("value", Sequence[Operand[Any]])


PURE = (
    AddPtrOp, PtrToIntOp, IntToPtrOp, PtrCastOp, FpCastOp, MulHiOp, TanhApproxOp,
    PreciseOp,
    DotOp, ReduceOp, ScanOp,
)  # fmt: skip
OPS = (*PURE, WarpgroupDotOp, WarpgroupResultOp, YieldOp)
