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

__all__ = [
    "abs",
    "ceil",
    "cos",
    "cosh",
    "div_rn",
    "erf",
    "erfc",
    "exp",
    "exp2",
    "expm1",
    "fabs",
    "fast_exp2f",
    "fast_expf",
    "fast_logf",
    "fast_tanhf",
    "finitef",
    "floor",
    "fma",
    "isinf",
    "isnan",
    "log",
    "log1p",
    "log2",
    "log10",
    "pow",
    "rint",
    "round",
    "rsqrt",
    "sin",
    "sinh",
    "sqrt",
    "sqrt_rn",
    "tan",
    "tanh",
    "trunc",
]  # fmt: skip

fabs = abs
fast_expf = exp
fast_logf = log


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
def log1p(x):
    """log(1 + x), accurate near zero."""
    y = 1.0 + x
    rounded = y - 1.0
    corrected = tl.log(y) * (x / tl.where(rounded == 0.0, 1.0, rounded))
    finite = tl.where(y == float("inf"), y, corrected)
    return tl.where(rounded == 0.0, x, finite)


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
    """1 - erf(x)."""
    return 1.0 - tl.erf(x)
