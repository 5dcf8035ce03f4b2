"""CUDA's libdevice functions by name, made of the language's own (no bitcode is linked).

Inputs are fp32 or fp64 unless said otherwise. Errors are those of the language's exp2 and log2:
a few units in the last place in fp32.
"""

# mypy: ignore-errors
# (the functions are read by our compiler, not run by Python)
from __future__ import annotations

import minitriton.language as tl
from minitriton.frontend.lang_math import (
    abs,
    ceil,
    cos,
    div_rn,
    erf,
    exp,
    exp2,
    fast_exp2f,
    fast_tanhf,
    floor,
    fma,
    log,
    log2,
    rsqrt,
    sin,
    sqrt,
    sqrt_rn,
    tanh,
)
from minitriton.frontend.source import DeviceFunction
from minitriton.language.extra.libdevice_bits import (
    add_rn,
    brev,
    clz,
    copysign,
    double_as_longlong,
    ffs,
    float_as_int,
    float_as_uint,
    int_as_float,
    ldexp,
    longlong_as_double,
    mul_rn,
    popc,
    signbit,
    sub_rn,
    uint_as_float,
)
from minitriton.language.extra.libdevice_inverse import (
    acos,
    acosh,
    asin,
    asinh,
    atan,
    atan2,
    atanh,
    cbrt,
    erfinv,
    hypot,
    log1p,
)

__all__ = [
    "abs",
    "acos",
    "acosh",
    "add_rn",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "brev",
    "cbrt",
    "ceil",
    "clz",
    "copysign",
    "cos",
    "cosh",
    "div_rn",
    "double_as_longlong",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "exp2",
    "exp10",
    "expm1",
    "fabs",
    "fast_cosf",
    "fast_dividef",
    "fast_exp2f",
    "fast_exp10f",
    "fast_expf",
    "fast_log2f",
    "fast_log10f",
    "fast_logf",
    "fast_powf",
    "fast_sinf",
    "fast_tanf",
    "fast_tanhf",
    "fdim",
    "ffs",
    "finitef",
    "float_as_int",
    "float_as_uint",
    "floor",
    "fma",
    "fma_rn",
    "fmod",
    "hypot",
    "int_as_float",
    "isfinited",
    "isinf",
    "isnan",
    "ldexp",
    "llrint",
    "llround",
    "log",
    "log1p",
    "log2",
    "log10",
    "longlong_as_double",
    "mul_rn",
    "nearbyint",
    "normcdf",
    "popc",
    "pow",
    "rcp_rn",
    "rint",
    "round",
    "rsqrt",
    "saturatef",
    "scalbn",
    "signbit",
    "sin",
    "sinh",
    "sqrt",
    "sqrt_rn",
    "sub_rn",
    "tan",
    "tanh",
    "trunc",
    "uint_as_float",
]  # fmt: skip

fabs = abs
fast_cosf = cos
fast_expf = exp
fast_log2f = log2
fast_logf = log
fast_sinf = sin
fma_rn = fma
scalbn = ldexp


@DeviceFunction
def pow(x, y):
    """x to the power of y as in C: negative x needs an integer y, and x ** 0 is 1."""
    magnitude = tl.exp2(y * tl.log2(tl.abs(x)))
    truncated = trunc(y)
    whole = truncated == y
    odd = whole & (trunc(y * 0.5) * 2.0 != y)
    signed = tl.where(x < 0, tl.where(odd, -magnitude, magnitude), magnitude)
    signed = tl.where((x < 0) & ~(whole | isinf(y)), float("nan"), signed)
    return tl.where((y == 0) | (x == 1), 1.0, signed)


@DeviceFunction
def trunc(x):
    """x rounded towards zero."""
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@DeviceFunction
def round(x):
    """Nearest integer, halves away from zero."""
    below = tl.floor(tl.abs(x))
    magnitude = tl.where(tl.abs(x) - below >= 0.5, below + 1.0, below)
    return tl.where(x < 0, -magnitude, magnitude)


@DeviceFunction
def rint(x):
    """Nearest integer, halves to the even one."""
    below = tl.floor(x)
    rest = x - below
    odd = tl.floor(below * 0.5) * 2.0 != below
    return tl.where((rest > 0.5) | ((rest == 0.5) & odd), below + 1.0, below)


@DeviceFunction
def isnan(x):
    """Whether x is NaN: int1."""
    return x != x


@DeviceFunction
def isinf(x):
    """Whether x is an infinity: int1."""
    return tl.abs(x) == float("inf")


@DeviceFunction
def finitef(x):
    """Whether x is neither infinite nor NaN: int1."""
    return tl.abs(x) < float("inf")


@DeviceFunction
def log10(x):
    """Logarithm to base 10."""
    return tl.log2(x) * 0.30102999566398120


@DeviceFunction
def expm1(x):
    """exp(x) - 1, accurate near zero."""
    y = tl.exp(x)
    small = x * (1.0 + x * (0.5 + x * (1.0 / 6 + x * (1.0 / 24 + x * (1.0 / 120 + x / 720)))))
    return tl.where(tl.abs(x) < 0.3, small, y - 1.0)


@DeviceFunction
def sinh(x):
    """Hyperbolic sine."""
    e = expm1(tl.abs(x))
    half = 0.5 * (e + e / (e + 1.0))
    half = tl.where(e == float("inf"), e, half)
    return tl.where(x < 0, -half, half)


@DeviceFunction
def cosh(x):
    """Hyperbolic cosine."""
    e = tl.exp(tl.abs(x))
    return 0.5 * e + 0.5 / e


@DeviceFunction
def tan(x):
    """Tangent."""
    return tl.sin(x) / tl.cos(x)


@DeviceFunction
def erfc(x):
    """1 - erf(x); in fp32 within 2^-16 of the result also where that is tiny."""
    if x.dtype == tl.float64:
        result = 1.0 - tl.erf(x)
    else:
        a = tl.abs(x)
        t = 1.0 / (1.0 + 0.5 * a)
        p = 0.17087277 * t - 0.82215223
        p = p * t + 1.48851587
        p = p * t - 1.13520398
        p = p * t + 0.27886807
        p = p * t - 0.18628806
        p = p * t + 0.09678418
        p = p * t + 0.37409196
        p = p * t + 1.00002368
        p = p * t - 1.26551223
        square = a * a
        rest = tl.fma(a, a, -square)
        far = t * tl.exp(p) * tl.exp(-square) * (1.0 - rest)
        far = tl.where(a > 11.0, 0.0, far)
        result = tl.where(x > 1.0, far, 1.0 - tl.erf(x))
        result = tl.where(x != x, x, result)
    return result


@DeviceFunction
def normcdf(x):
    """Probability that a normal variable is below x."""
    return 0.5 * erfc(-0.7071067811865476 * x)


@DeviceFunction
def exp10(x):
    """10 to the power of x."""
    high = x * 3.321928094887362
    low = tl.fma(x, tl.full_like(x, 3.321928094887362), -high)
    if x.dtype == tl.float32:
        low += x * 7.059526e-08  # what fp32 rounds off the factor
    near = tl.exp2(high) * (1.0 + low * 0.6931471805599453)
    return tl.where(tl.abs(x) < 1000.0, near, tl.exp2(high))


@DeviceFunction
def fmod(x, y):
    """Remainder of a division rounded towards zero, with the sign of x."""
    return x % y


@DeviceFunction
def fdim(x, y):
    """x - y where that is positive, else 0."""
    return tl.where(x <= y, 0.0, x - y)


@DeviceFunction
def saturatef(x):
    """x limited to 0 to 1; 0 for NaN."""
    return tl.where(x > 0.0, tl.where(x < 1.0, x, 1.0), 0.0)


@DeviceFunction
def rcp_rn(x):
    """1 / x rounded to nearest."""
    if x.dtype == tl.float64:
        inverse = 1.0 / x
    else:
        inverse = tl.div_rn(tl.full_like(x, 1.0), x)
    return inverse


@DeviceFunction
def fast_dividef(x, y):
    """x / y as the operator."""
    return x / y


@DeviceFunction
def llrint(x):
    """Nearest integer, halves to the even one: int64."""
    return rint(x).to(tl.int64)


@DeviceFunction
def llround(x):
    """Nearest integer, halves away from zero: int64."""
    return round(x).to(tl.int64)


isfinited = finitef
nearbyint = rint
fast_exp10f = exp10
fast_log10f = log10
fast_powf = pow
fast_tanf = tan
