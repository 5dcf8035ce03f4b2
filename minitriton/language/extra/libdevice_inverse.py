"""Libdevice's inverse functions and roots, of fp32 and fp64, made of the language's own.

Relative errors are a few units in the last place, where not said otherwise.
"""

# mypy: ignore-errors
# (the functions are read by our compiler, not run by Python)
from __future__ import annotations

import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction
from minitriton.language.extra.libdevice_bits import copysign, signbit


@DeviceFunction
def log1p(x):
    """log(1 + x), accurate near zero."""
    y = 1.0 + x
    rounded = y - 1.0
    corrected = tl.log(y) * (x / tl.where(rounded == 0.0, 1.0, rounded))
    finite = tl.where(y == float("inf"), y, corrected)
    return tl.where(rounded == 0.0, x, finite)


@DeviceFunction
def _atan_near_zero(x):
    """atan(x) where |x| <= tan(pi / 8): minimax polynomial, or quotient of two, in x * x."""
    z = x * x
    if x.dtype == tl.float64:
        p = -8.750608600031904122785e-1
        p = p * z - 1.615753718733365076637e1
        p = p * z - 7.500855792314704667340e1
        p = p * z - 1.228866684490136173410e2
        p = p * z - 6.485021904942025371773e1
        q = z + 2.485846490142306297962e1
        q = q * z + 1.650270098316988542046e2
        q = q * z + 4.328810604912902668951e2
        q = q * z + 4.853903996359136964868e2
        q = q * z + 1.945506571482613964425e2
        r = p / q
    else:
        r = 8.05374449538e-2 * z - 1.38776856032e-1
        r = r * z + 1.99777106478e-1
        r = r * z - 3.33329491539e-1
    return r * z * x + x


@DeviceFunction
def atan(x):
    """Inverse tangent, within -pi/2 and pi/2."""
    a = tl.abs(x)
    large = a > 2.414213562373095
    middle = a > 0.4142135623730951
    reduced = tl.where(middle, (a - 1.0) / (a + 1.0), a)
    reduced = tl.where(large, -1.0 / a, reduced)
    start = tl.where(large, 1.5707963267948966, tl.where(middle, 0.7853981633974483, 0.0 * a))
    return copysign(start + _atan_near_zero(reduced), x)


@DeviceFunction
def atan2(y, x):
    """Angle of the point (x, y), within -pi and pi; signs of zeros count."""
    up, across = tl.abs(y), tl.abs(x)
    equal = (up == across) & ((up == 0.0) | (up == float("inf")))
    ratio = tl.where(equal, tl.where(up == 0.0, 0.0, 1.0), up / across)
    angle = atan(ratio)
    angle = tl.where(signbit(x) != 0, 3.141592653589793 - angle, angle)
    return copysign(angle, y)


@DeviceFunction
def asin(x):
    """Inverse sine; NaN beyond -1 and 1."""
    return atan(x / tl.sqrt((1.0 - x) * (1.0 + x)))


@DeviceFunction
def acos(x):
    """Inverse cosine, within 0 and pi; NaN beyond -1 and 1."""
    return 2.0 * atan(tl.sqrt((1.0 - x) / (1.0 + x)))


@DeviceFunction
def asinh(x):
    """Inverse hyperbolic sine."""
    a = tl.abs(x)
    large = a > 1e15
    small = tl.where(large, 0.0, a)
    near = log1p(small + small * small / (1.0 + tl.sqrt(small * small + 1.0)))
    far = tl.log(tl.where(large, a, 1.0)) + 0.6931471805599453
    return copysign(tl.where(large, far, near), x)


@DeviceFunction
def acosh(x):
    """Inverse hyperbolic cosine, not negative; NaN below 1."""
    t = tl.where(x > 1e15, 1.0, x) - 1.0
    near = log1p(t + tl.sqrt(2.0 * t + t * t))
    return tl.where(x > 1e15, tl.log(x) + 0.6931471805599453, near)


@DeviceFunction
def atanh(x):
    """Inverse hyperbolic tangent; NaN beyond -1 and 1."""
    a = tl.abs(x)
    return copysign(0.5 * log1p(2.0 * a / (1.0 - a)), x)


@DeviceFunction
def cbrt(x):
    """Cubic root."""
    a = tl.abs(x)
    ends = (a == 0.0) | (a == float("inf"))
    inner = tl.where(ends, 1.0, a)
    root = tl.exp2(tl.log2(inner) / 3.0)
    root = root - (root - inner / (root * root)) / 3.0
    return copysign(tl.where(ends, a, root), x)


@DeviceFunction
def hypot(x, y):
    """sqrt(x * x + y * y) without overflow on the way."""
    a, b = tl.abs(x), tl.abs(y)
    larger, smaller = tl.maximum(a, b), tl.minimum(a, b)
    ends = (larger == 0.0) | (larger == float("inf"))
    ratio = smaller / tl.where(ends, 1.0, larger)
    length = larger * tl.sqrt(1.0 + ratio * ratio)
    unknown = ((x != x) | (y != y)) & (larger != float("inf"))
    return tl.where(unknown, float("nan"), tl.where(ends, larger, length))


@DeviceFunction
def erfinv(x):
    """The number whose erf is x. fp64 is refined from fp32's: precise while |x| < 0.999."""
    w = -tl.log((1.0 - x) * (1.0 + x))
    n = w - 2.5
    p = 2.81022636e-08
    p = p * n + 3.43273939e-07
    p = p * n - 3.5233877e-06
    p = p * n - 4.39150654e-06
    p = p * n + 0.00021858087
    p = p * n - 0.00125372503
    p = p * n - 0.00417768164
    p = p * n + 0.246640727
    p = p * n + 1.50140941
    f = tl.sqrt(w) - 3.0
    q = -0.000200214257
    q = q * f + 0.000100950558
    q = q * f + 0.00134934322
    q = q * f - 0.00367342844
    q = q * f + 0.00573950773
    q = q * f - 0.0076224613
    q = q * f + 0.00943887047
    q = q * f + 1.00167406
    q = q * f + 2.83297682
    y = tl.where(w < 5.0, p, q) * x
    if x.dtype == tl.float64:
        for _ in tl.static_range(2):
            y = y - (tl.erf(y) - x) * 0.886226925452758 * tl.exp(y * y)
    return tl.where(tl.abs(x) == 1.0, x * float("inf"), y)
