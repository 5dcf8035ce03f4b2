"""Floating-point arithmetic of f16, bf16, f32 and f64 (and packed pairs) on raw bits.

`floating(op, type, mods)` resolves one instruction. Each rule has a core on numbers; modifiers
(.ftz, .sat, .relu) and NaN canonicalisation wrap the core. All results are rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from minitriton.runtime.emulator import fma64
from minitriton.runtime.emulator.alu_integer import Operation, paired, with_out
from minitriton.runtime.emulator.formats import (
    F32,
    F64,
    FORMATS,
    NAN32,
    U32,
    U64,
    Bits,
    add_to_odd,
    bf16_from_f32,
    bits_dtype,
    canonical_f32,
    f16_from_f32,
    flush_f32,
    narrow,
    odd_to_f32,
    to_f32,
    widen,
)

Numbers: TypeAlias = NDArray[Any]
_TIE_MASK, _TIE = np.uint64(0x1FFFFFFF), np.uint64(0x10000000)
# Between these, the product of two bf16 and its sum with a bf16 are free of float32's limits.
_SAFE_LEAST, _SAFE_MOST = np.float32(2.0**-100), np.float32(2.0**120)
_LEAST_NORMAL = np.float32(2.0**-126)
SIGN = {"f16": 0x8000, "bf16": 0x8000, "f32": 1 << 31, "f64": 1 << 63}
EXPONENT = {"f16": 0x7C00, "bf16": 0x7F80, "f32": 0x7F800000, "f64": 0x7FF << 52}
NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "f64": 0xFFF8 << 48}
_ONE = {"f16": 0x3C00, "bf16": 0x3F80, "f32": 0x3F800000, "f64": 0x3FF << 52}


def rounding(mods: frozenset[str]) -> str:
    """The rounding modifier of an instruction; to nearest even when there is none."""
    return next((mode for mode in ("rz", "rm", "rp") if mode in mods), "rn")


def fma_f32(a: Numbers, b: Numbers, c: Numbers) -> NDArray[np.float32]:
    """a * b + c of float32 rounded once to nearest even."""
    product = np.multiply(a, b, dtype=F64)
    addend = np.asarray(c).astype(F64)
    total = np.asarray(product + addend)
    result = np.asarray(total.astype(F32))
    # Rounding the float64 sum again goes wrong only on a tie of float32 or in its subnormals.
    tie = np.count_nonzero((total.view(U64) & _TIE_MASK) == _TIE)
    if tie or np.count_nonzero((np.abs(result) <= _LEAST_NORMAL) & (total != 0)):
        return np.asarray(add_to_odd(product, addend).astype(F32))
    return result


def flush(bits: Bits, ptx_type: str) -> Bits:
    """Subnormals to zero of the same sign."""
    if ptx_type == "f32":
        return flush_f32(bits)
    dtype = bits_dtype(ptx_type)
    tiny = np.bitwise_and(bits, dtype.type(EXPONENT[ptx_type])) == 0
    return np.where(tiny, np.bitwise_and(bits, dtype.type(SIGN[ptx_type])), bits)


def saturate(bits: Bits, ptx_type: str) -> Bits:
    """Clamp to [+0, 1]; NaN becomes +0."""
    dtype = bits_dtype(ptx_type)
    negative = np.bitwise_and(bits, dtype.type(SIGN[ptx_type])) != 0
    unordered = is_nan(bits, ptx_type)
    one = dtype.type(_ONE[ptx_type])
    return np.where(negative | unordered, dtype.type(0), np.minimum(bits, one))


def rectify(bits: Bits, ptx_type: str) -> Bits:
    """Negative numbers to +0, NaN canonical (.relu)."""
    dtype = bits_dtype(ptx_type)
    negative = np.bitwise_and(bits, dtype.type(SIGN[ptx_type])) != 0
    out = np.where(negative, dtype.type(0), bits)
    return np.where(is_nan(bits, ptx_type), dtype.type(NAN[ptx_type]), out)


def is_nan(bits: Bits, ptx_type: str) -> NDArray[np.bool_]:
    """Which lanes hold a NaN."""
    dtype = bits_dtype(ptx_type)
    magnitude = np.bitwise_and(bits, dtype.type(SIGN[ptx_type] - 1))
    return magnitude > dtype.type(EXPONENT[ptx_type])


def modified(
    core: Callable[..., Any], ptx_type: str, mods: frozenset[str], flush_out: bool = True
) -> Operation:
    """Wrap a core on bits in .ftz of inputs and output, .relu and .sat."""
    ftz, sat, relu = "ftz" in mods, "sat" in mods, "relu" in mods

    def run(*operands: Bits) -> Bits:
        if ftz:
            operands = tuple(flush(operand, ptx_type) for operand in operands)
        result = core(*operands)
        if ftz and flush_out:
            result = flush(result, ptx_type)
        if relu:
            result = rectify(result, ptx_type)
        return saturate(result, ptx_type) if sat else result

    return with_out(run, bits_dtype(ptx_type))


def _float_ufunc(function: np.ufunc) -> Operation:
    """The hot form of an f32 instruction with no modifiers: one ufunc and the NaN check."""

    def run(*operands: Bits, out: Bits | None = None) -> Bits:
        viewed = [operand.view(F32) for operand in operands]
        if out is None:
            return canonical_f32(function(*viewed))
        return canonical_f32(function(*viewed, out=out.view(F32)))

    return run


def _f32_rule(op: str, mods: frozenset[str]) -> Operation:
    mode = rounding(mods)
    if mode != "rn":
        return modified(_directed_f32(op, mode), "f32", mods)
    function = _NUMBERS[op]
    if not mods & {"ftz", "sat"} and isinstance(function, np.ufunc):
        return _float_ufunc(function)
    if not mods & {"ftz", "sat"} and op == "fma":
        return _fma_hot

    def core(*operands: Bits) -> Bits:
        return canonical_f32(function(*(operand.view(F32) for operand in operands)))

    return modified(core, "f32", mods)


def _fma_hot(a: Bits, b: Bits, c: Bits, out: Bits | None = None) -> Bits:
    result = canonical_f32(fma_f32(a.view(F32), b.view(F32), c.view(F32)))
    if out is None:
        return result
    out[...] = result
    return out


def _directed_f32(op: str, mode: str) -> Callable[..., Bits]:
    """rz, rm and rp of f32: a float64 result that lies on the right side of every float32."""

    def core(*operands: Bits) -> Bits:
        values = [widen(operand, "f32") for operand in operands]
        if op in ("add", "sub"):
            values[1] = -values[1] if op == "sub" else values[1]
            exact, terms = add_to_odd(*values), values
        elif op == "fma":
            terms = [values[0] * values[1], values[2]]
            exact = add_to_odd(*terms)
        else:
            # Quotients and roots of float32 are never within 2^-53 of a float32 unless equal.
            exact, terms = np.asarray(_DOUBLES[op](*values)), []
        if mode == "rm" and terms:  # an exact zero sum is -0 when rounding down
            unequal = np.signbit(terms[0]) != np.signbit(terms[1])
            exact = np.where((exact == 0) & unequal, -0.0, exact)
        return narrow(exact, FORMATS["f32"], mode)

    return core


def _f64_rule(op: str, mods: frozenset[str]) -> Operation:
    mode = rounding(mods)
    if mode != "rn":
        return with_out(fma64.directed(op, mode), np.dtype(U64))
    function = fma64.fma if op == "fma" else _DOUBLES[op]

    def run(*operands: Bits, out: Bits | None = None) -> Bits:
        result = np.asarray(function(*(operand.view(F64) for operand in operands))).view(U64)
        if out is None:
            return result
        out[...] = result
        return out

    return run


def _f16_core(op: str) -> Callable[..., Bits]:
    def core(*operands: Bits) -> Bits:
        values = [to_f32(operand, "f16") for operand in operands]
        if op == "fma":  # products of f16 are exact in float32
            return f16_from_f32(add_to_odd(values[0] * values[1], values[2]))
        # float32 has more than twice the bits of f16 plus two: rounding twice is harmless.
        return f16_from_f32(_NUMBERS[op](*values))

    return core


def _bf16_core(op: str) -> Callable[..., Bits]:
    def core(*operands: Bits) -> Bits:
        values = [to_f32(operand, "bf16") for operand in operands]
        if op in ("add", "sub"):  # harmless as for f16; sums in the subnormal range are exact
            return bf16_from_f32(_NUMBERS[op](*values))
        product = np.asarray(values[0] * values[1])
        exact = (np.abs(product) > _SAFE_LEAST) & (np.abs(product) < _SAFE_MOST)
        if np.count_nonzero(exact) == exact.size:
            return bf16_from_f32(add_to_odd(product, values[2]) if op == "fma" else product)
        a, b, *c = (value.astype(F64) for value in values)
        return bf16_from_f32(odd_to_f32(add_to_odd(a * b, c[0]) if c else a * b))

    return core


def _arithmetic(op: str) -> Callable[[str, frozenset[str]], Operation]:
    def rule(ptx_type: str, mods: frozenset[str]) -> Operation:
        if ptx_type == "f32":
            return _f32_rule(op, mods)
        if ptx_type == "f64":
            return _f64_rule(op, mods)
        if op not in ("add", "sub", "mul", "fma"):
            raise KeyError(ptx_type)
        core = _f16_core(op) if ptx_type == "f16" else _bf16_core(op)
        return modified(core, ptx_type, mods)

    return rule


def _extremum(largest: bool) -> Callable[[str, frozenset[str]], Operation]:
    """min and max: -0 is less than +0; a NaN loses to a number unless .NaN is given."""

    def rule(ptx_type: str, mods: frozenset[str]) -> Operation:
        dtype = bits_dtype(ptx_type)
        sign, nan = dtype.type(SIGN[ptx_type]), dtype.type(NAN[ptx_type])
        magnitude = np.invert(sign)
        number = _viewer(ptx_type)

        def core(a: Bits, b: Bits) -> Bits:
            sign_of = np.bitwise_and(np.bitwise_xor(a, b), sign)
            if "xorsign" in mods:
                a, b = np.bitwise_and(a, magnitude), np.bitwise_and(b, magnitude)
            left, right = number(a), number(b)
            first = np.greater(left, right) if largest else np.less(left, right)
            negative = np.bitwise_and(b if largest else a, sign) != 0
            first = first | ((left == right) & negative)
            a_nan, b_nan = left != left, right != right
            result = np.where((first | b_nan) & ~a_nan, a, b)
            result = np.where(a_nan | b_nan if "NaN" in mods else a_nan & b_nan, nan, result)
            return np.bitwise_or(result, sign_of) if "xorsign" in mods else result

        return modified(core, ptx_type, mods)

    return rule


def _viewer(ptx_type: str) -> Callable[[Bits], Numbers]:
    if ptx_type in ("f32", "f64"):
        dtype = F32 if ptx_type == "f32" else F64
        return lambda bits: bits.view(dtype)
    return lambda bits: to_f32(bits, ptx_type)


def _sign_rule(change: str) -> Callable[[str, frozenset[str]], Operation]:
    """abs and neg."""

    def rule(ptx_type: str, mods: frozenset[str]) -> Operation:
        sign = bits_dtype(ptx_type).type(SIGN[ptx_type])
        if change == "neg":
            return modified(lambda a: np.bitwise_xor(a, sign), ptx_type, mods)
        return modified(lambda a: np.bitwise_and(a, np.invert(sign)), ptx_type, mods)

    return rule


def _copysign(ptx_type: str, mods: frozenset[str]) -> Operation:
    """copysign d, a, b: the magnitude of b with the sign of a."""
    dtype = bits_dtype(ptx_type)
    sign = dtype.type(SIGN[ptx_type])
    rest = np.invert(sign)
    return with_out(lambda a, b: np.bitwise_and(a, sign) | np.bitwise_and(b, rest), dtype)


def _test_property(ptx_type: str, mods: frozenset[str]) -> Operation:
    """testp: finite, infinite, number, notanumber, normal or subnormal, as a predicate."""
    dtype = bits_dtype(ptx_type)
    exponent = dtype.type(EXPONENT[ptx_type])
    magnitude = dtype.type(SIGN[ptx_type] - 1)
    hidden = dtype.type(EXPONENT[ptx_type] & -EXPONENT[ptx_type])
    tests: dict[str, Callable[[Bits], Any]] = {
        "finite": lambda m: m < exponent,
        "infinite": lambda m: m == exponent,
        "number": lambda m: m <= exponent,
        "notanumber": lambda m: m > exponent,
        "normal": lambda m: (m >= hidden) & (m < exponent),
        "subnormal": lambda m: (m > 0) & (m < hidden),
    }
    test = tests[next(name for name in tests if name in mods)]
    return with_out(lambda a: test(np.bitwise_and(a, magnitude)), np.dtype(bool))


_NUMBERS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "fma": fma_f32,
    "div": np.divide,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
}
_DOUBLES: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
}

SINGLE_RULES: dict[str, Callable[[str, frozenset[str]], Operation]] = {
    **{name: _arithmetic(name) for name in ("add", "sub", "mul", "fma", "div", "rcp", "sqrt")},
    "mad": _arithmetic("fma"),
    "min": _extremum(largest=False),
    "max": _extremum(largest=True),
    "neg": _sign_rule("neg"),
    "abs": _sign_rule("abs"),
    "copysign": _copysign,
    "testp": _test_property,
}


def floating(
    op: str,
    ptx_type: str,
    mods: frozenset[str],
    rules: dict[str, Callable[[str, frozenset[str]], Operation]],
) -> Operation:
    """One floating-point instruction from `rules`; packed types apply it to both halves."""
    if ptx_type.endswith("x2"):
        single = rules[op](ptx_type[:-2], mods)
        return with_out(paired(single), U32)
    return rules[op](ptx_type, mods)


__all__ = ["NAN32", "SINGLE_RULES", "floating", "fma_f32", "is_nan", "modified", "rounding"]
