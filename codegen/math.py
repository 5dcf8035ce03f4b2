"""Transcendental and other expanded float functions in f32, and the table for f64.

Error bounds in units in the last place (ulp), tested in tests/codegen/test_math.py:
f32  exp 2 + 1.5 |x| (ex2.approx of x*log2e, as Triton), exp2 2, log 1.5, log2 2, sin/cos 2,
     tanh 2.5, erf 2.5, sqrt and rsqrt as sqrt.approx and rsqrt.approx (1), divf 2 (div.full).
f64  see math64.py.
sin and cos reduce by pi/2 in three parts, beyond |x| = 1e5 in double precision; from 2^50 on the
result is meaningless but inside [-1, 1]. 16-bit floats are computed in f32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from minitriton.codegen import math64
from minitriton.codegen.elementwise import Scalar, map_registers, rule
from minitriton.codegen.floats import Floats
from minitriton.codegen.tile import carried
from minitriton.ir.dialect import element_of
from minitriton.ir.mlir import ir

if TYPE_CHECKING:
    from minitriton.codegen.lower import Lowering

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
MAGIC = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer, found in the low bits
LARGE_ANGLE = 1.0e5
# minimax fits (weighted, on the interval the comment names), highest power first
LOG_TAIL = (  # (log1p(f) - f) / f^2 on [-1/3, 1/3]
    -0.1330706684, 0.1400511261, -0.1207932408, 0.1400108134, -0.1668940298, 0.2001075236,
    -0.2499951067, 0.3333320836, -0.500000027,
)  # fmt: skip
# (sin x - x) / x^3 and (cos x - 1 + x^2/2) / x^4 in x^2, on [-pi/4, pi/4]
SIN_TAIL = (-0.0001951632471, 0.008332170189, -0.166666548)
COS_TAIL = (2.443869451e-5, -0.00138873706, 0.04166664695)
# (tanh x - x) / x^3 in x^2, on [-0.61, 0.61]
TANH_TAIL = (-0.005830531861, 0.02074512035, -0.05377028063, 0.1333178515, -0.3333329371)
ERF_SPLIT = 0.95  # here the smallest polynomials do on both sides
ERF_SMALL = (  # erf(x) / x - 1 in x^2, up to ERF_SPLIT
    -0.0005885863195, 0.004973390729, -0.0267539829, 0.1128150065, -0.3761246663, 0.128379146,
)  # fmt: skip
ERF_LARGE = (  # log2(1 - erf(x)) from there to 4; beyond it only falls
    -0.00173184967, 0.02189896666, -0.1296846628, -0.9414540779, -1.614198768, -0.003246121938,
)  # fmt: skip


def _exp(f: Floats, x: ir.Value) -> ir.Value:
    return f.op("math.exp2", f.mul(x, LOG2E))


def _exp2(f: Floats, x: ir.Value) -> ir.Value:
    """Subnormal results are zero, as in Triton: keeping them takes three further instructions."""
    return f.approximate("ex2.approx.ftz.f32", x)


def _logarithm(f: Floats, x: ir.Value, base: int) -> ir.Value:
    """x = 2^i * (1 + g) with 1 + g in [2/3, 4/3)."""
    low = f.lowering
    encoded = f.bits(x)
    finite = low.compare("ult", low.add(encoded, -1), 0x7F7FFFFF)  # positive, neither 0 nor inf
    small = f.compare("olt", x, 2.0**-126)
    bits = f.bits(f.select(small, f.mul(x, 2.0**23), x))
    exponent = low.and_(low.add(bits, -0x3F2AAAAB), -(1 << 23))
    g = f.sub(f.from_bits(low.binary("subi", bits, exponent)), 1.0)
    whole = low.op("arith.sitofp", f.type, (exponent,))
    whole = f.fma(whole, 2.0**-23, f.select(small, -23.0, 0.0))
    tail = f.fma(f.polynomial(g, LOG_TAIL), f.mul(g, g), g)
    result = f.fma(whole, LN2, tail) if base == 0 else f.fma(tail, LOG2E, whole)
    special = f.select(f.compare("olt", x, 0.0), math.nan, x)
    special = f.select(f.compare("oeq", x, 0.0), -math.inf, special)
    return f.select(finite, result, special)


def _tanh(f: Floats, x: ir.Value) -> ir.Value:
    magnitude = f.abs(x)
    square = f.mul(x, x)
    small = f.fma(f.mul(f.polynomial(square, TANH_TAIL), square), x, x)
    power = _exp2(f, f.mul(magnitude, 2 * LOG2E))  # 1 or more
    inverse = f.approximate("rcp.approx.f32", f.add(power, 1.0))
    large = f.fma(inverse, -2.0, 1.0)
    return f.copysign(f.select(f.compare("olt", magnitude, 0.6), small, large), x)


def _erf(f: Floats, x: ir.Value) -> ir.Value:
    magnitude = f.abs(x)
    small = f.fma(f.polynomial(f.mul(x, x), ERF_SMALL), x, x)
    power = _exp2(f, f.polynomial(magnitude, ERF_LARGE))  # below 2^-26 from 4 on: erf rounds to 1
    large = f.copysign(f.sub(1.0, power), x)
    return f.select(f.compare("ogt", magnitude, ERF_SPLIT), large, small)


def _sqrt(f: Floats, x: ir.Value) -> ir.Value:
    return f.approximate("sqrt.approx.f32", x)


def _rsqrt(f: Floats, x: ir.Value) -> ir.Value:
    return f.approximate("rsqrt.approx.f32", x)


def _divf(f: Floats, lhs: ir.Value, rhs: ir.Value) -> ir.Value:
    return f.approximate("div.full.f32", lhs, rhs)


def _remf(f: Floats, lhs: ir.Value, rhs: ir.Value) -> ir.Value:
    """C's fmod: exact while |lhs / rhs| < 2^23 (f64: 2^52).

    The quotient may round up to the next integer; then the remainder comes out with the wrong
    sign and one divisor is added back.
    """
    quotient = f.op("math.trunc", f.div(lhs, rhs))
    remainder = f.fma(f.op("arith.negf", quotient), rhs, lhs)
    product = f.copysign(1.0, remainder)
    wrong = f.compare("olt", f.mul(product, f.copysign(1.0, lhs)), 0.0)
    back = f.add(remainder, f.copysign(f.abs(rhs), lhs))
    zero = f.compare("oeq", remainder, 0.0)
    result = f.select(wrong, f.select(zero, remainder, back), remainder)
    result = f.copysign(result, lhs)
    # an infinite divisor leaves a finite dividend alone
    infinite = f.compare("oeq", f.abs(rhs), math.inf)
    finite = f.compare("olt", f.abs(lhs), math.inf)
    return f.select(f.lowering.and_(infinite, finite), lhs, result)


F32: dict[str, Callable[..., ir.Value]] = {
    "math.exp": _exp,
    "math.exp2": _exp2,
    "math.log": lambda f, x: _logarithm(f, x, 0),
    "math.log2": lambda f, x: _logarithm(f, x, 2),
    "math.tanh": _tanh,
    "math.erf": _erf,
    "mt.tanh_approx": lambda f, x: f.approximate("tanh.approx.f32", x),
    "math.sqrt": _sqrt,
    "math.rsqrt": _rsqrt,
    "arith.divf": _divf,
    "arith.remf": _remf,
}
F64: dict[str, Callable[..., ir.Value]] = {
    **math64.FUNCTIONS,
    "arith.divf": Floats.div,
    "arith.remf": _remf,
}


def _function(name: str) -> Scalar:
    def scalar(lowering: Lowering, *operands: ir.Value) -> ir.Value:
        type_ = operands[0].type
        if type_ == lowering.f64:
            return F64[name](Floats(lowering, type_), *operands)
        f = Floats(lowering, lowering.f32)
        if type_ == lowering.f32:
            return F32[name](f, *operands)
        wide = [lowering.op("arith.extf", f.type, (v,)) for v in operands]
        return lowering.op("arith.truncf", type_, (F32[name](f, *wide),))

    return scalar


# Angles: whether a far reduction is needed is asked once for all registers of a tile


def _near(f: Floats, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """(x - q * pi/2, q as i32) for |x| < LARGE_ANGLE."""
    shifted = f.fma(x, 2 / math.pi, MAGIC)
    quotient = f.sub(shifted, MAGIC)
    rest = f.fma(quotient, -1.5707963705062866, x)
    rest = f.fma(quotient, 4.371138828673793e-08, rest)
    rest = f.fma(quotient, 1.7151245100058819e-15, rest)
    return rest, f.bits(shifted)


def _far(f: Floats, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The same in f64, for |x| < 2^50."""
    low = f.lowering
    wide = Floats(low, low.f64)
    rest, quotient = math64.reduce_angle(wide, low.op("arith.extf", low.f64, (x,)))
    return low.op("arith.truncf", f.type, (rest,)), quotient


def _wave(f: Floats, rest: ir.Value, quadrant: ir.Value) -> ir.Value:
    """sin(rest + quadrant * pi/2)."""
    low = f.lowering
    square = f.mul(rest, rest)
    sine = f.fma(f.mul(f.polynomial(square, SIN_TAIL), square), rest, rest)
    cosine = f.fma(f.polynomial(square, COS_TAIL), f.mul(square, square), f.fma(square, -0.5, 1.0))
    odd = low.compare("ne", low.and_(quadrant, 1), 0)
    result = f.select(odd, cosine, sine)
    sign = low.shl(low.and_(quadrant, 2), 30)
    return f.from_bits(low.xor(f.bits(result), sign))


def _angles(phase: int) -> Callable[[Lowering, ir.Operation], None]:
    """sin (phase 0) or cos (phase 1)."""

    def all_of(
        f: Floats, xs: Sequence[ir.Value], reduce: Callable[..., tuple[ir.Value, ir.Value]]
    ) -> list[ir.Value]:
        results = []
        for x in xs:
            rest, quotient = reduce(f, x)
            quadrant = f.lowering.add(quotient, phase) if phase else quotient
            wave = _wave(f, rest, quadrant)
            if reduce is _far:
                wave = f.select(f.compare("uno", x, x), x, f.at_least(f.at_most(wave, 1.0), -1.0))
                wave = f.select(f.compare("oeq", f.abs(x), math.inf), math.nan, wave)
            results.append(wave)
        return results

    def lower(lowering: Lowering, op: ir.Operation) -> None:
        type_ = carried(element_of(op.results[0].type))
        if type_ == lowering.f64:
            wide = Floats(lowering, type_)
            map_registers(lowering, op, lambda values: math64.wave(wide, values[0], phase))
            return
        f = Floats(lowering, lowering.f32)
        xs = list(lowering.registers(op.operands[0]))
        if type_ != f.type:
            xs = [lowering.op("arith.extf", f.type, (x,)) for x in xs]
        near = [f.compare("olt", f.abs(x), LARGE_ANGLE) for x in xs]
        all_near = near[0]
        for condition in near[1:]:
            all_near = lowering.and_(all_near, condition)
        results = lowering.branch(
            all_near, [f.type] * len(xs), lambda: all_of(f, xs, _near), lambda: all_of(f, xs, _far)
        )
        if type_ != f.type:
            results = [lowering.op("arith.truncf", type_, (r,)) for r in results]
        lowering.set_registers(op.results[0], results)

    return lower


def _inverse(f: Floats, divisor: ir.Value) -> tuple[ir.Value, ir.Value]:
    """(s, 1 / (s * divisor)): as div.full scales, so that neither is subnormal or overflows."""
    size = f.abs(divisor)
    small = f.select(f.compare("olt", size, 2.0**-126), 2.0**24, 1.0)
    scale = f.select(f.compare("ogt", size, 2.0**126), 0.25, small)
    return scale, f.approximate("rcp.approx.ftz.f32", f.mul(divisor, scale))


def _divide(lowering: Lowering, op: ir.Operation) -> None:
    """Division; a divisor shared by registers is inverted once: the same bits as by div.full, in
    two instructions each where ptxas makes three."""
    divisors = lowering.registers(op.operands[1])
    shared = set(divisors)
    if divisors[0].type != lowering.f32 or len(shared) == len(divisors):
        rule(_function("arith.divf"))(lowering, op)
        return
    f = Floats(lowering, lowering.f32)
    inverses = {divisor: _inverse(f, divisor) for divisor in dict.fromkeys(divisors)}

    def quotient(values: Sequence[ir.Value]) -> ir.Value:
        scale, inverse = inverses[values[1]]
        return f.mul(f.mul(values[0], scale), inverse)

    map_registers(lowering, op, quotient)


def _precise(lowering: Lowering, op: ir.Operation) -> None:
    name = ir.StringAttr(op.attributes["function"]).value
    target = {"div": "arith.divf", "sqrt": "math.sqrt"}[name]
    type_ = carried(element_of(op.results[0].type))
    map_registers(lowering, op, lambda values: lowering.op(target, type_, values))


RULES = {
    **{name: rule(_function(name)) for name in F32},
    "arith.divf": _divide,
    "math.sin": _angles(0),
    "math.cos": _angles(1),
    "mt.precise": _precise,
}
