"""What each tile-IR op means, on numpy arrays: the rule table of the tile interpreter.

bf16 and fp8 values are held as float32 that were rounded to the type; pointers are int64
addresses; integers are signed arrays of their width, i1 is bool.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from minitriton.ir.dialect import MemType, PtrType, element_of, shape_of
from minitriton.ir.mlir import ir

_NUMPY = {"f16": np.float16, "f32": np.float32, "f64": np.float64, "bf16": np.float32,
          "f8E4M3FN": np.float32, "f8E5M2": np.float32}  # fmt: skip
_NARROW = {"bf16": (8, 7, False), "f8E5M2": (5, 2, False), "f8E4M3FN": (4, 3, True)}


def numpy_type(element: ir.Type) -> type:
    """numpy type that holds an MLIR scalar type."""
    if isinstance(element, PtrType):
        return np.int64
    if isinstance(element, ir.IntegerType):
        width = element.width
        return np.bool_ if width == 1 else getattr(np, f"int{width}")
    return _NUMPY[str(element)]


def item_bytes(element: ir.Type) -> int:
    """Bytes of one element in global memory."""
    if isinstance(element, PtrType):
        return 8
    return max(element.width // 8, 1)


def round_to(values: Any, element: ir.Type) -> Any:
    """Values rounded (to nearest even) to an MLIR type and held in its numpy type."""
    name = str(element)
    if name not in _NARROW:
        with np.errstate(all="ignore"):
            return np.asarray(values).astype(numpy_type(element))
    exponent_bits, mantissa, saturating = _NARROW[name]
    x = np.asarray(values, np.float64)
    bias = (1 << (exponent_bits - 1)) - 1
    largest = 448.0 if saturating else (2 - 2.0**-mantissa) * 2.0**bias
    with np.errstate(all="ignore"):
        exponent = np.floor(np.log2(np.abs(x)))
        exponent = np.maximum(np.where(np.isfinite(exponent), exponent, 0), 1 - bias)
        step = 2.0 ** (exponent - mantissa)
        rounded = np.round(x / step) * step
    if name == "bf16":
        rounded = np.where(np.abs(rounded) > largest, np.copysign(np.inf, x), rounded)
    else:
        rounded = np.where(np.abs(rounded) > largest, np.copysign(largest, x), rounded)
    return np.where(np.isnan(x), np.nan, rounded).astype(np.float32)


def from_bits(raw: np.ndarray, element: ir.Type) -> np.ndarray:
    """Memory content (unsigned integers of the element's size) as interpreter values."""
    name = str(element)
    if name == "bf16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    if name in ("f8E5M2", "f8E4M3FN"):
        return _fp8_table(name)[raw]
    if isinstance(element, ir.IntegerType) and element.width == 1:
        return raw != 0
    return raw.view(numpy_type(element))


def to_bits(values: np.ndarray, element: ir.Type) -> np.ndarray:
    """The inverse of `from_bits`."""
    name = str(element)
    unsigned = getattr(np, f"uint{8 * item_bytes(element)}")
    values = np.ascontiguousarray(values)
    if name == "bf16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if name in ("f8E5M2", "f8E4M3FN"):
        magnitudes = _fp8_table(name)[:128].astype(np.float64)
        order = np.searchsorted(magnitudes[: _finite(name)], np.abs(values).astype(np.float64))
        code = np.where(np.isnan(values), 127, np.minimum(order, _finite(name) - 1))
        return (code + 128 * np.signbit(values)).astype(np.uint8)
    return values.astype(numpy_type(element)).view(unsigned)


def _finite(name: str) -> int:
    return 124 if name == "f8E5M2" else 127


def _fp8_table(name: str) -> np.ndarray:
    exponent_bits, mantissa, _ = _NARROW[name]
    bias = (1 << (exponent_bits - 1)) - 1
    out = np.empty(256, np.float32)
    for code in range(256):
        exponent, fraction = (code & 127) >> mantissa, code & ((1 << mantissa) - 1)
        scale = 2.0 ** (max(exponent, 1) - bias)
        value = scale * ((exponent > 0) + fraction / (1 << mantissa))
        if name == "f8E5M2" and exponent == 31:
            value = math.nan if fraction else math.inf
        if name == "f8E4M3FN" and (code & 127) == 127:
            value = math.nan
        out[code] = -value if code > 127 else value
    return out


def _unsigned(x: np.ndarray) -> np.ndarray:
    return x if x.dtype == np.bool_ else x.view(getattr(np, f"uint{8 * x.itemsize}"))


def _truncating_division(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    # magnitudes are unsigned: that of the most negative number does not fit the signed type
    divisor = np.where(b == 0, 1, b).astype(b.dtype)
    quotient = (_unsigned(np.abs(a)) // _unsigned(np.abs(divisor))).view(a.dtype)
    return np.where((a < 0) != (divisor < 0), -quotient, quotient).astype(a.dtype)


def _shift(x: np.ndarray, amount: np.ndarray, left: bool) -> np.ndarray:
    bits = 8 * x.itemsize
    count = _unsigned(amount)
    clamped = np.minimum(count, bits - 1).astype(x.dtype)
    if left or x.dtype.kind == "u":
        out = np.left_shift(x, clamped) if left else np.right_shift(x, clamped)
        return np.where(count >= bits, 0, out).astype(x.dtype)
    return np.right_shift(x, clamped)


def _nan_max(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: np.where(np.isnan(a), b, np.where(np.isnan(b), a, function(a, b)))


BINARY: dict[str, Callable[[np.ndarray, np.ndarray], Any]] = {
    "arith.addi": lambda a, b: a ^ b if a.dtype == np.bool_ else a + b,
    "arith.subi": lambda a, b: a ^ b if a.dtype == np.bool_ else a - b,
    "arith.muli": lambda a, b: a * b,
    "arith.divsi": _truncating_division,
    "arith.remsi": lambda a, b: a - _truncating_division(a, b) * b,
    "arith.divui": lambda a, b: (_unsigned(a) // np.maximum(_unsigned(b), 1)).view(a.dtype),
    "arith.remui": lambda a, b: (_unsigned(a) % np.maximum(_unsigned(b), 1)).view(a.dtype),
    "arith.andi": lambda a, b: a & b, "arith.ori": lambda a, b: a | b,
    "arith.xori": lambda a, b: a ^ b,
    "arith.shli": lambda a, b: _shift(a, b, True),
    "arith.shrsi": lambda a, b: _shift(a, b, False),
    "arith.shrui": lambda a, b: _shift(_unsigned(a), b, False).view(a.dtype),
    "arith.maxsi": np.maximum, "arith.minsi": np.minimum,
    "arith.maxui": lambda a, b: np.maximum(_unsigned(a), _unsigned(b)).view(a.dtype),
    "arith.minui": lambda a, b: np.minimum(_unsigned(a), _unsigned(b)).view(a.dtype),
    "arith.addf": np.add, "arith.subf": np.subtract, "arith.mulf": np.multiply,
    "arith.divf": np.divide, "arith.remf": np.fmod,
    "arith.maximumf": np.maximum, "arith.minimumf": np.minimum,
    "arith.maxnumf": _nan_max(np.maximum), "arith.minnumf": _nan_max(np.minimum),
    "mt.mulhi": lambda a, b: np.array(
        [int(x) * int(y) >> 8 * a.itemsize
         for x, y in zip(_unsigned(a).ravel(), _unsigned(b).ravel(), strict=True)],
        _unsigned(a).dtype).reshape(a.shape).view(a.dtype),
    "math.powf": np.power, "math.copysign": np.copysign, "math.atan2": np.arctan2,
}  # fmt: skip

UNARY: dict[str, Callable[[np.ndarray], Any]] = {
    "arith.negf": np.negative, "math.absf": np.abs, "math.absi": np.abs,
    "math.exp": np.exp, "math.exp2": np.exp2, "math.log": np.log, "math.log2": np.log2,
    "math.sin": np.sin, "math.cos": np.cos, "math.tan": np.tan, "math.tanh": np.tanh,
    "mt.tanh_approx": np.tanh,
    "math.sqrt": np.sqrt, "math.rsqrt": lambda x: 1 / np.sqrt(x),
    "math.floor": np.floor, "math.ceil": np.ceil, "math.round": np.round,
    "math.roundeven": np.rint, "math.trunc": np.trunc, "math.expm1": np.expm1,
    "math.log1p": np.log1p,
    "math.erf": np.vectorize(math.erf, otypes=[np.float64]),
}  # fmt: skip

_CMPI = ("eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge")
_CMPF = ("false", "oeq", "ogt", "oge", "olt", "ole", "one", "ord",
         "ueq", "ugt", "uge", "ult", "ule", "une", "uno", "true")  # fmt: skip
_ORDER = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
          "gt": np.greater, "ge": np.greater_equal}  # fmt: skip


def compare_int(predicate: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """arith.cmpi."""
    name = _CMPI[predicate]
    if name in ("eq", "ne"):
        return _ORDER[name](a, b)
    if name[0] == "u":
        a, b = _unsigned(a), _unsigned(b)
    return _ORDER[name[1:]](a, b)


def compare_float(predicate: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """arith.cmpf."""
    name = _CMPF[predicate]
    unordered = np.isnan(a) | np.isnan(b)
    if name in ("true", "false"):
        return np.full(np.shape(a), name == "true")
    if name in ("ord", "uno"):
        return ~unordered if name == "ord" else unordered
    result = _ORDER[name[1:]](a, b)
    return result | unordered if name[0] == "u" else result & ~unordered


def cast(name: str, value: np.ndarray, source: ir.Type, result: ir.Type) -> np.ndarray:
    """arith.* and mt.* conversions between scalar types."""
    dest = numpy_type(result)
    with np.errstate(all="ignore"):
        if name in ("arith.extui", "arith.uitofp"):
            return round_to(_unsigned(value), result)
        if name == "arith.extsi" and value.dtype == np.bool_:
            return -value.astype(dest)
        if name == "arith.trunci":
            return (value & 1).astype(np.bool_) if dest is np.bool_ else value.astype(dest)
        if name in ("arith.fptosi", "arith.fptoui"):
            wide = np.trunc(value.astype(np.float64))
            if name == "arith.fptoui":
                unsigned = getattr(np, f"uint{8 * np.dtype(dest).itemsize}")
                return wide.astype(unsigned).view(dest)
            return wide.astype(dest)
        if name == "arith.bitcast":
            return from_bits(to_bits(value, source), result)
        return round_to(value, result)


CASTS = frozenset({
    "arith.extsi", "arith.extui", "arith.trunci", "arith.sitofp", "arith.uitofp", "arith.fptosi",
    "arith.fptoui", "arith.extf", "arith.truncf", "arith.bitcast", "mt.ptr_to_int", "mt.int_to_ptr",
    "mt.ptr_cast",
})  # fmt: skip


def result_shape(type_: ir.Type) -> tuple[int, ...]:
    """Shape of a tile, buffer or scalar type ((), for a scalar)."""
    if isinstance(type_, MemType):
        return tuple(type_.tensor_type.shape)
    return shape_of(type_) or ()


def scalar_type(type_: ir.Type) -> ir.Type:
    """Element type of a tile or buffer type."""
    return type_.tensor_type.element_type if isinstance(type_, MemType) else element_of(type_)
