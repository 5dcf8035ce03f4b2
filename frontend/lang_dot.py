"""Matrix products: tl.dot."""

from __future__ import annotations

from typing import Any

from minitriton.frontend import constants
from minitriton.frontend.active import builtin, emitter
from minitriton.frontend.casting import to_tensor
from minitriton.frontend.errors_semantic import (
    DotAccumulator,
    DotMinimumK,
    DotShapes,
    DotStepK,
    DotTypes,
    WrongDtype,
)
from minitriton.frontend.lang_shape import tile
from minitriton.frontend.values import Tensor, is_number, unwrap
from minitriton.ir import dtypes
from minitriton.ir.dtypes import block_type, dtype

PRECISIONS = ("tf32", "tf32x3", "bf16x3", "bf16x6", "ieee")
_OPERANDS = (
    dtypes.int8, dtypes.uint8, dtypes.float16, dtypes.bfloat16, dtypes.float32, dtypes.float64,
    dtypes.float8e5, dtypes.float8e4nv,
)  # fmt: skip
_MINIMUM_K = {8: 32, 16: 16, 32: 8, 64: 4}  # bits of an element: smallest K of an instruction


UNLIMITED = 1 << 30


@builtin
def dot(
    input: Any,
    other: Any,
    acc: Any = None,
    input_precision: Any = None,
    allow_tf32: Any = None,
    max_num_imprecise_acc: Any = None,
    out_dtype: Any = dtypes.float32,
) -> Tensor:
    """input @ other (+ acc) of tiles of rank 2, or 3 with a leading batch dimension.

    Operands fp16, bf16, fp32, fp64, fp8, int8 of one type (two fp8 types may mix); the sum is
    formed in fp32, int32 or fp64, or in fp16 on request. K has a minimum of 8 (32 bits), 16
    (16 bits) or 32 (8 bits), and comes in steps of that. `input_precision` says how fp32 operands
    are multiplied: "tf32" (default), as sums of parts by "tf32x3", "bf16x3" (errors of 2^-16) or
    "bf16x6" (about 2^-23), or "ieee". `max_num_imprecise_acc`: how many fp8 products Hopper may
    sum with its 14 bits or so; all by default, as in Triton.
    """
    e = emitter()
    a, b = tile("tl.dot", input), tile("tl.dot", other)
    a, b = _checked_types(a, b)
    shape = _result_shape(a, b)
    precision = _precision(input_precision, allow_tf32)
    result = _result_type(a.dtype, unwrap(out_dtype))
    accumulator = accumulator_of(unwrap(acc), block_type(result, shape))
    limit = unwrap(max_num_imprecise_acc)
    attributes = {
        "input_precision": e.string(precision),
        "max_imprecise": e.i32(
            (UNLIMITED if a.dtype.is_fp8() else 0)
            if limit is None
            else constants.integer(limit, "the limit")
        ),
    }
    if a.dtype.is_int_unsigned():
        attributes |= {"mt.unsigned_a": e.unit(), "mt.unsigned_b": e.unit()}
    return e.op("mt.dot", accumulator.type, [a, b, accumulator], attributes)


def _checked_types(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    for side, name in ((a, "input"), (b, "other")):
        if side.dtype not in _OPERANDS:
            raise WrongDtype(
                "tl.dot", str(side.type), ", ".join(map(str, _OPERANDS)), "cast it with .to(...)"
            ).about(name)
    if a.dtype != b.dtype and not (a.dtype.is_fp8() and b.dtype.is_fp8()):
        raise DotTypes(str(a.type), str(b.type), "both must have one element type")
    return a, b


def _result_shape(a: Tensor, b: Tensor) -> tuple[int, ...]:
    names = str(a.type), str(b.type)
    if len(a.shape) not in (2, 3) or len(b.shape) != len(a.shape):
        raise DotShapes(*names, "both must have rank 2, or both rank 3")
    if a.shape[-1] != b.shape[-2]:
        reason = f"the inner dimensions differ ({a.shape[-1]} and {b.shape[-2]})"
        raise DotShapes(*names, reason)
    if a.shape[:-2] != b.shape[:-2]:
        raise DotShapes(*names, "the batch dimensions differ")
    k, minimum = a.shape[-1], _MINIMUM_K[a.dtype.bits]
    if k < minimum:
        raise DotMinimumK(k, minimum, str(a.dtype))
    if k % minimum:
        raise DotStepK(k, minimum, str(a.dtype))
    return (*a.shape[:-1], b.shape[-1])


def _precision(input_precision: Any, allow_tf32: Any) -> str:
    wanted = unwrap(input_precision)
    if wanted is not None:
        return constants.choice("input_precision", wanted, PRECISIONS)
    allow = unwrap(allow_tf32)
    if allow is None:
        return str(emitter().options.get("default_dot_input_precision", "tf32"))
    return "tf32" if constants.flag(allow, "allow_tf32") else "ieee"


def _result_type(operand: dtype, out: Any) -> dtype:
    if operand.is_int():
        return dtypes.int32
    if operand.is_fp64():
        return dtypes.float64
    wanted: dtype = constants.element_type(out, "out_dtype")
    if wanted not in (dtypes.float32, dtypes.float16):
        raise WrongDtype(
            "out_dtype of tl.dot", str(wanted), "fp32 and fp16", "cast the result with .to(...)"
        ).about("out_dtype")
    if (wanted.is_fp16() and operand.bits > 16) or (wanted.is_fp16() and operand.is_bf16()):
        return dtypes.float32
    return wanted


def accumulator_of(acc: Any, product: block_type) -> Tensor:
    """`acc` where it has the type of the product; zeros for None or 0."""
    e = emitter()
    if acc is None or (is_number(acc) and acc == 0):
        return e.constant(product, 0)
    tensor = to_tensor(e, acc, "acc")
    if tensor.shape == product.shape and tensor.dtype == product.element_ty:
        return tensor
    raise DotAccumulator(str(tensor.type), str(product)).about("acc")
