"""f64 functions as argument reduction and a polynomial.

Errors in ulp: exp, exp2 1.5, log 1.5, log2 2, tanh 2, erf 2, rsqrt 1.5, sqrt exact; sin and cos
within 2^-52 absolutely for |x| < 2^30, less exact beyond, meaningless from 2^50 on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from minitriton.codegen.floats import Floats
from minitriton.ir.mlir import ir

if TYPE_CHECKING:
    from minitriton.codegen.lower import Lowering

LOG2E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.6931471805599453, 2.3190468138462996e-17
# pi/2 = the sum of these, each the rounding of what the earlier ones leave
HALF_PI = (1.5707963267948966, 6.123233995736766e-17, -1.4973849048591698e-33)
MAGIC = 6755399441055744.0  # 1.5 * 2^52
EXP_TAIL = (  # (exp r - 1 - r) / r^2 on [-ln2/2, ln2/2]
    2.092673894883784e-09, 2.5112155273499785e-08, 2.755723414437316e-07, 2.755723455927176e-06,
    2.480158737260064e-05, 0.00019841269896627862, 0.0013888888888859213, 0.008333333333316977,
    0.04166666666666672, 0.16666666666666682, 0.5,
)  # fmt: skip
LOG_TAIL = (  # (2 atanh s - 2 s) / s^3 in s^2, on [-0.2, 0.2]
    0.13840770986157802, 0.13173935345930043, 0.15391091912271757, 0.18181666489849452,
    0.22222224286230483, 0.2857142855591822, 0.4000000000005631, 0.666666666666666,
)  # fmt: skip
SIN_TAIL = (
    -7.578626252655758e-13, 1.6058365211534862e-10, -2.5052104900717133e-08,
    2.7557319214149697e-06, -0.0001984126984125499, 0.008333333333333323, -0.16666666666666666,
)  # fmt: skip
COS_TAIL = (
    4.738079819848944e-14, -1.1470292727890623e-11, 2.0876754362659147e-09,
    -2.7557319215367656e-07, 2.48015873015715e-05, -0.0013888888888888874, 0.041666666666666664,
)  # fmt: skip
TANH_TAIL = (  # (tanh x - x) / x^3 in x^2, on [-0.56, 0.56]
    7.263562232228918e-06, -3.2640562242806314e-05, 9.371790593310647e-05,
    -0.00023810470332130448, 0.000589802708483191, -0.001455800317699422, 0.003592124494046555,
    -0.008863235283455092, 0.021869488525215516, -0.053968253967968956, 0.1333333333333296,
    -0.3333333333333333,
)  # fmt: skip
ERF_SMALL = (  # erf(x) / x - 1 in x^2, on [-1, 1]
    -4.233068829871351e-12, 8.710425353056866e-11, -1.2164956964156818e-09,
    1.4792467662250282e-08, -1.6364649333877628e-07, 1.6462045964416235e-06,
    -1.4925647593674793e-05, 0.00012055332903783834, -0.000854832702195535, 0.0052239776254236,
    -0.026866170645129868, 0.1128379167095512, -0.37612638903183754, 0.1283791670955126,
)  # fmt: skip
ERFC_SCALED = (  # erfc(x) exp(x^2) (1 + 2 x) in t = (x - 2) / (x + 2), for x in [1, 6]
    4.4295417494382636e-06, 4.960874205899339e-06, -1.3391206314269874e-05,
    -3.680893052677556e-05, -1.4852337760073532e-06, 0.0001510974219553884,
    0.00020636011761349376, -0.0004543456468360312, -0.0014568132659578468,
    0.001271339189089979, 0.008722653845214945, -0.008034015087958172, -0.054220000991414476,
    0.16405128003350536, -0.166030397615294, -0.09276382658574622, 1.2769783815525286,
)  # fmt: skip


def _low_int(f: Floats, shifted: ir.Value) -> ir.Value:
    """i32 integer that was rounded to by adding MAGIC."""
    low: Lowering = f.lowering
    return low.op("arith.trunci", low.i32, (f.bits(shifted),))


def _power_of_two(f: Floats, exponent: ir.Value) -> ir.Value:
    """2^exponent for an i32 in -1022 .. 1023."""
    low = f.lowering
    biased = low.op("arith.extui", low.i64, (low.add(exponent, 1023),))
    return f.from_bits(low.shl(biased, 52))


def _scaled_exp(f: Floats, rest: ir.Value, shifted: ir.Value) -> ir.Value:
    """exp(rest) * 2^k for |rest| <= ln2/2; halves of k are applied in turn, so k may be any."""
    low = f.lowering
    tail = f.fma(f.polynomial(rest, EXP_TAIL), f.mul(rest, rest), rest)
    whole = _low_int(f, shifted)
    half = low.binary("shrsi", whole, 1)
    result = f.mul(f.add(tail, 1.0), _power_of_two(f, half))
    return f.mul(result, _power_of_two(f, low.binary("subi", whole, half)))


def _exp(f: Floats, x: ir.Value) -> ir.Value:
    clamped = f.at_least(f.at_most(x, 720.0), -760.0)
    shifted = f.fma(clamped, LOG2E, MAGIC)
    whole = f.sub(shifted, MAGIC)
    rest = f.fma(whole, -LN2_LOW, f.fma(whole, -LN2_HIGH, clamped))
    return f.select(f.compare("uno", x, x), x, _scaled_exp(f, rest, shifted))


def _exp2(f: Floats, x: ir.Value) -> ir.Value:
    clamped = f.at_least(f.at_most(x, 1030.0), -1090.0)
    shifted = f.add(clamped, MAGIC)
    rest = f.mul(f.sub(clamped, f.sub(shifted, MAGIC)), LN2_HIGH)
    return f.select(f.compare("uno", x, x), x, _scaled_exp(f, rest, shifted))


def _logarithm(f: Floats, x: ir.Value, base: int) -> ir.Value:
    """x = 2^i * (1 + g) with 1 + g in [2/3, 4/3), s = g / (2 + g)."""
    low = f.lowering
    finite = low.compare("ult", low.add(f.bits(x), -1), 0x7FEFFFFFFFFFFFFF)
    small = f.compare("olt", x, 2.0**-1022)
    bits = f.bits(f.select(small, f.mul(x, 2.0**54), x))
    exponent = low.and_(low.add(bits, -0x3FE5555555555555), -(1 << 52))
    g = f.sub(f.from_bits(low.binary("subi", bits, exponent)), 1.0)
    count = low.op("arith.trunci", low.i32, (low.binary("shrsi", exponent, 52),))
    whole = f.add(low.op("arith.sitofp", f.type, (count,)), f.select(small, -54.0, 0.0))
    s = f.div(g, f.add(g, 2.0))
    square = f.mul(s, s)
    # 2 s = g - s g, and g is exact
    inner = f.fma(f.polynomial(square, LOG_TAIL), f.op("arith.negf", square), g)
    tail = f.fma(f.op("arith.negf", s), inner, g)
    if base == 0:
        result = f.fma(whole, LN2_HIGH, f.fma(whole, LN2_LOW, tail))
    else:
        result = f.fma(tail, LOG2E, whole)
    special = f.select(f.compare("olt", x, 0.0), math.nan, x)
    special = f.select(f.compare("oeq", x, 0.0), -math.inf, special)
    return f.select(finite, result, special)


def reduce_angle(f: Floats, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """(x - q * pi/2, q modulo 2^32 as i32) for |x| < 2^50."""
    shifted = f.fma(x, 2 / math.pi, MAGIC)
    quotient = f.sub(shifted, MAGIC)
    rest = x
    for part in HALF_PI:
        rest = f.fma(quotient, -part, rest)
    return rest, _low_int(f, shifted)


def wave(f: Floats, x: ir.Value, phase: int) -> ir.Value:
    """sin(x + phase * pi/2)."""
    low = f.lowering
    rest, quadrant = reduce_angle(f, x)
    if phase:
        quadrant = low.add(quadrant, phase)
    square = f.mul(rest, rest)
    sine = f.fma(f.mul(f.polynomial(square, SIN_TAIL), square), rest, rest)
    half = f.fma(square, -0.5, 1.0)
    cosine = f.fma(f.polynomial(square, COS_TAIL), f.mul(square, square), half)
    result = f.select(low.compare("ne", low.and_(quadrant, 1), 0), cosine, sine)
    negative = low.compare("ne", low.and_(quadrant, 2), 0)
    result = f.select(negative, f.op("arith.negf", result), result)
    clamped = f.at_least(f.at_most(result, 1.0), -1.0)
    defined = f.compare("olt", f.abs(x), math.inf)
    return f.select(defined, clamped, math.nan)


def _tanh(f: Floats, x: ir.Value) -> ir.Value:
    magnitude = f.abs(x)
    square = f.mul(x, x)
    small = f.fma(f.mul(f.polynomial(square, TANH_TAIL), square), x, x)
    power = _exp(f, f.mul(magnitude, 2.0))
    large = f.sub(1.0, f.div(2.0, f.add(power, 1.0)))
    return f.copysign(f.select(f.compare("olt", magnitude, 0.55), small, large), x)


def _erf(f: Floats, x: ir.Value) -> ir.Value:
    magnitude = f.abs(x)
    small = f.fma(f.polynomial(f.mul(x, x), ERF_SMALL), x, x)
    a = f.at_most(magnitude, 6.0)  # erf(6) rounds to 1
    t = f.div(f.sub(a, 2.0), f.add(a, 2.0))
    decay = _exp(f, f.op("arith.negf", f.mul(a, a)))
    rest = f.div(f.mul(decay, f.polynomial(t, ERFC_SCALED)), f.fma(a, 2.0, 1.0))
    large = f.copysign(f.sub(1.0, rest), x)
    return f.select(f.compare("ogt", magnitude, 1.0), large, small)


FUNCTIONS: dict[str, Callable[..., ir.Value]] = {
    "math.exp": _exp,
    "math.exp2": _exp2,
    "math.log": lambda f, x: _logarithm(f, x, 0),
    "math.log2": lambda f, x: _logarithm(f, x, 2),
    "math.tanh": _tanh,
    "math.erf": _erf,
    "math.sqrt": lambda f, x: f.op("math.sqrt", x),
    "math.rsqrt": lambda f, x: f.div(1.0, f.op("math.sqrt", x)),
}
