"""Products of microscaled (MX) operands: tl.dot_scaled.

Without tensor cores for them, operands are widened to 16 bits, multiplied by the scales of their
blocks, and then multiplied as usual.
"""

from __future__ import annotations

from typing import Any

from minitriton.frontend import arithmetic, constants
from minitriton.frontend.active import builtin, emitter
from minitriton.frontend.casting import bitcast, cast
from minitriton.frontend.errors_dot import (
    ScaledDepth,
    ScaledFormat,
    ScaledPacking,
    ScaledResult,
    ScaleShape,
    ScaleType,
)
from minitriton.frontend.lang_dot import accumulator_of, dot
from minitriton.frontend.lang_shape import join, permute, reshape, tile
from minitriton.frontend.values import Tensor, unwrap
from minitriton.ir import dtypes
from minitriton.ir.dtypes import block_type, dtype

FP4 = "e2m1"
FORMATS = {  # what elements are; what they may be passed as instead
    FP4: (dtypes.uint8, dtypes.uint8),
    "e4m3": (dtypes.float8e4nv, dtypes.uint8),
    "e5m2": (dtypes.float8e5, dtypes.uint8),
    "bf16": (dtypes.bfloat16, dtypes.uint16),
    "fp16": (dtypes.float16, dtypes.uint16),
}
_PLAIN = ("bf16", "fp16")
MX_BLOCK, NV_BLOCK = 32, 16  # elements per scale of type e8m0, e4m3
NAN_SCALE = 255


@builtin
def dot_scaled(
    lhs: Any,
    lhs_scale: Any,
    lhs_format: Any,
    rhs: Any,
    rhs_scale: Any,
    rhs_format: Any,
    acc: Any = None,
    fast_math: Any = False,
    lhs_k_pack: Any = True,
    rhs_k_pack: Any = True,
    out_dtype: Any = dtypes.float32,
) -> Tensor:
    """lhs [M, K] @ rhs [K, N] (+ acc), of numbers that share scales in blocks along K; fp32.

    Formats are "e2m1", "e4m3", "e5m2", "bf16" and "fp16". Two e2m1 lie in a uint8, the first in the
    low bits, along K, or without `lhs_k_pack` (`rhs_k_pack`) along M (N). Scales [M, K / 32] and
    [N, K / 32] are powers of two, uint8 with a bias of 127 (0 gives 0, 255 NaN, or infinity with
    `fast_math`); [.., K / 16] of type fp8e4nv; or None. Operands become bf16, or fp16 where one of
    them is.
    """
    wanted = constants.element_type(out_dtype, "out_dtype")
    if wanted != dtypes.float32:
        raise ScaledResult(str(wanted)).about("out_dtype")
    left, right = (
        constants.choice(f"{side}_format", value, tuple(FORMATS))
        for side, value in (("lhs", lhs_format), ("rhs", rhs_format))
    )
    compute = dtypes.float16 if "fp16" in (left, right) else dtypes.bfloat16
    keep_nan = not constants.flag(fast_math, "fast_math")
    a = _widened("lhs", lhs, left, lhs_k_pack, compute)
    b = _widened("rhs", rhs, right, rhs_k_pack, compute)
    if a.shape[-1] != b.shape[-2]:
        raise ScaledDepth(a.shape[-1], b.shape[-2]).about("rhs")
    a = _scaled("lhs", a, lhs_scale, keep_nan)
    b = _scaled("rhs", b, rhs_scale, keep_nan)
    product = block_type(wanted, (*a.shape[:-1], b.shape[-1]))
    total = accumulator_of(unwrap(acc), product)
    return dot(a, b, total)


def _widened(side: str, value: Any, form: str, k_pack: Any, compute: dtype) -> Tensor:
    """An operand as a tile of `compute`, one element for each number."""
    e = emitter()
    operand = tile("tl.dot_scaled", value)
    element, bits = FORMATS[form]
    along_k = constants.flag(k_pack, f"{side}_k_pack")
    if operand.dtype not in (element, bits):
        allowed = " or ".join(sorted({str(element), str(bits)}))
        raise ScaledFormat(str(operand.type), form, allowed).about(side)
    if form != FP4:
        if not along_k:
            raise ScaledPacking(side, form).about(f"{side}_k_pack")
        return cast(e, bitcast(e, operand, element), compute)
    types = [block_type(compute, operand.shape)] * 2
    _, (low, high) = e.multi("mt.unpack_e2m1", types, [operand])
    pairs = join(low, high)
    *batch, rows, columns = operand.shape
    if along_k == (side == "lhs"):  # along the last dimension
        return reshape(pairs, (*batch, rows, 2 * columns))
    return reshape(_transposed(pairs), (*batch, 2 * rows, columns))


def _transposed(value: Tensor) -> Tensor:
    """The last two dimensions swapped."""
    rank = len(value.shape)
    return permute(value, (*range(rank - 2), rank - 1, rank - 2))


def _scaled(side: str, value: Tensor, scale: Any, keep_nan: bool) -> Tensor:
    """An operand times the scale of each block along K; scales have K last on both sides."""
    name = f"{side}_scale"
    plain = unwrap(scale)
    if plain is None:
        return value
    e = emitter()
    scales = tile("tl.dot_scaled", plain)
    if scales.dtype not in (dtypes.uint8, dtypes.float8e4nv):
        raise ScaleType(str(scales.type)).about(name)
    block = MX_BLOCK if scales.dtype == dtypes.uint8 else NV_BLOCK
    *outer, depth = value.shape
    if side == "rhs":
        outer[-1], depth = depth, outer[-1]
    if scales.shape != (*outer, depth // block) or depth % block:
        wanted = str([*outer, depth // block])
        raise ScaleShape(name, str(list(scales.shape)), wanted).about(name)
    factors = _factors(scales, value.dtype, keep_nan)
    spread = arithmetic.broadcast_to(
        e, arithmetic.expand_dims(e, factors, len(outer) + 1), (*factors.shape, block)
    )
    along = reshape(spread, (*outer, depth))
    return arithmetic.mul(e, value, _transposed(along) if side == "rhs" else along)


def _factors(scales: Tensor, compute: dtype, keep_nan: bool) -> Tensor:
    """Scales as numbers of type `compute`: the bits of an e8m0 are the exponent of a bf16."""
    e = emitter()
    if scales.dtype != dtypes.uint8:
        return cast(e, scales, compute)
    wide, shift = (dtypes.bfloat16, 7) if compute.is_bf16() else (dtypes.float32, 23)
    bits = cast(e, scales, dtypes.int16 if wide.is_bf16() else dtypes.int32)
    factors = cast(e, bitcast(e, arithmetic.shl(e, bits, shift), wide), compute)
    if not keep_nan:
        return factors
    nan = e.constant(factors.type, float("nan"))
    return arithmetic.select(e, arithmetic.compare(e, scales, NAN_SCALE, "=="), nan, factors)
