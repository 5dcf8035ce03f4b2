"""Elementwise functions of the language: selection, extremes, and mathematics.

Transcendental functions take fp32 and fp64 only, as in Triton: a narrower input must be cast by the
user, who then sees in which precision the function is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minitriton.frontend import arithmetic, constants
from minitriton.frontend.active import builtin, emitter
from minitriton.frontend.casting import cast, to_tensor
from minitriton.frontend.errors import NotConstexpr, kind_of
from minitriton.frontend.errors_semantic import WrongDtype
from minitriton.frontend.values import PropagateNan, Tensor, is_number, unwrap
from minitriton.ir import dtypes


def _float_operand(function: str, value: Any) -> Tensor:
    tensor = to_tensor(emitter(), unwrap(value))
    if tensor.dtype.is_ptr() or tensor.dtype not in (dtypes.float32, dtypes.float64):
        remedy = "cast it: x.to(tl.float32)" if not tensor.dtype.is_ptr() else ""
        raise WrongDtype(function, str(tensor.type), "fp32 and fp64", remedy)
    return tensor


def _unary(name: str, operation: str, description: str) -> Callable[[Any], Tensor]:
    @builtin
    def function(x: Any) -> Tensor:
        value = _float_operand(f"tl.{name}", x)
        return emitter().op(operation, value.type, [value])

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"{description}, elementwise, of fp32 or fp64."
    return function


exp = _unary("exp", "math.exp", "e to the power of x")
exp2 = _unary("exp2", "math.exp2", "2 to the power of x")
log = _unary("log", "math.log", "Natural logarithm")
log2 = _unary("log2", "math.log2", "Logarithm to base 2")
sin = _unary("sin", "math.sin", "Sine")
cos = _unary("cos", "math.cos", "Cosine")
sqrt = _unary("sqrt", "math.sqrt", "Square root (approximate in fp32)")
rsqrt = _unary("rsqrt", "math.rsqrt", "Reciprocal of the square root")
floor = _unary("floor", "math.floor", "Largest integer not above x")
ceil = _unary("ceil", "math.ceil", "Smallest integer not below x")
erf = _unary("erf", "math.erf", "Error function")
tanh = _unary("tanh", "math.tanh", "Hyperbolic tangent")


def _instruction(name: str, operation: str, description: str) -> Callable[[Any], Tensor]:
    @builtin
    def function(x: Any) -> Tensor:
        value = _float_operand(f"libdevice.{name}", x)
        if value.dtype.is_fp64():
            raise WrongDtype(f"libdevice.{name}", str(value.type), "fp32")
        return emitter().op(operation, value.type, [value])

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"{description} of fp32 by one instruction, elementwise."
    return function


fast_tanhf = _instruction(
    "fast_tanhf", "mt.tanh_approx", "Hyperbolic tangent (relative error up to 2^-11)"
)
fast_exp2f = exp2


@builtin
def sqrt_rn(x: Any) -> Tensor:
    """Square root of fp32, rounded to nearest."""
    value = _float_operand("tl.sqrt_rn", x)
    e = emitter()
    if value.dtype.is_fp64():
        return e.op("math.sqrt", value.type, [value])
    return e.op("mt.precise", value.type, [value], {"function": e.string("sqrt")})


@builtin
def abs(x: Any) -> Any:
    """Absolute value of a float or an integer."""
    plain = unwrap(x)
    if is_number(plain):
        return plain if plain >= 0 else -plain
    value = to_tensor(emitter(), plain)
    if value.dtype.is_ptr():
        raise WrongDtype("tl.abs", str(value.type), "numbers")
    e = emitter()
    if value.dtype.is_fp8():
        return cast(e, e.op("math.absf", *_wide(value)), value.dtype)
    if value.dtype.is_floating():
        return e.op("math.absf", value.type, [value])
    if value.dtype.is_int_signed():
        return e.op("math.absi", value.type, [value])
    return value


def _wide(value: Tensor) -> tuple[Any, list[Tensor]]:
    wide = cast(emitter(), value, dtypes.float32)
    return wide.type, [wide]


def _extreme(name: str, x: Any, y: Any, propagate_nan: Any) -> Tensor:
    """Minimum or maximum. Literals count with their own type and bf16 is computed in fp32."""
    e = emitter()
    left, right = to_tensor(e, unwrap(x)), to_tensor(e, unwrap(y))
    left, right = (
        cast(e, s, dtypes.float32) if s.dtype == dtypes.bfloat16 else s for s in (left, right)
    )
    a, b = arithmetic.operands(e, left, right, f"tl.{name}imum")
    if a.dtype.is_floating():
        kind = "imumf" if nan_mode(propagate_nan) is PropagateNan.ALL else "numf"
        if a.dtype.is_fp8():
            wide = [cast(e, s, dtypes.float32) for s in (a, b)]
            return cast(e, e.op(f"arith.{name}{kind}", wide[0].type, wide), a.dtype)
    else:
        kind = "si" if a.dtype.is_int_signed() else "ui"
    return e.op(f"arith.{name}{kind}", a.type, [a, b])


def nan_mode(value: Any) -> PropagateNan:
    """A tl.PropagateNan given as a constant."""
    plain = unwrap(value)
    if not isinstance(plain, PropagateNan):
        raise NotConstexpr("propagate_nan", kind_of(plain), "a member of tl.PropagateNan")
    return plain


@builtin
def minimum(x: Any, y: Any, propagate_nan: Any = PropagateNan.NONE) -> Tensor:
    """Smaller of both; NaN only if both are, or if one is with PropagateNan.ALL."""
    return _extreme("min", x, y, propagate_nan)


@builtin
def maximum(x: Any, y: Any, propagate_nan: Any = PropagateNan.NONE) -> Tensor:
    """Larger of both; NaN only if both are, or if one is with PropagateNan.ALL."""
    return _extreme("max", x, y, propagate_nan)


@builtin
def clamp(x: Any, min: Any, max: Any, propagate_nan: Any = PropagateNan.NONE) -> Tensor:
    """`x` limited to min..max."""
    e = emitter()
    mode = nan_mode(propagate_nan)
    value = to_tensor(e, unwrap(x))
    if value.dtype.is_ptr() or not value.dtype.is_floating():
        raise WrongDtype("tl.clamp", str(value.type), "floats", "use tl.minimum and tl.maximum")
    result = _extreme("max", value, min, mode)
    return _extreme("min", result, max, mode)


@builtin
def where(condition: Any, x: Any, y: Any) -> Tensor:
    """`x` where `condition` is true, else `y`; both are evaluated, all broadcast together."""
    e = emitter()
    chosen = arithmetic.to_bool(e, unwrap(condition))
    x, y = unwrap(x), unwrap(y)
    if all(isinstance(v, Tensor) and v.dtype.is_ptr() for v in (x, y)) and x.dtype == y.dtype:
        a, b = arithmetic.broadcast(e, x, y)
    elif is_number(x) and is_number(y):
        a, b = arithmetic.operands(e, to_tensor(e, x), to_tensor(e, y), "tl.where")
    else:
        a, b = arithmetic.operands(e, x, y, "tl.where")
    if chosen.is_tile:
        chosen, a, b = arithmetic.broadcast(e, chosen, a, b)
    return arithmetic.select(e, chosen, a, b)


@builtin
def fma(x: Any, y: Any, z: Any) -> Tensor:
    """x * y + z with one rounding."""
    e = emitter()
    a, b = arithmetic.operands(e, unwrap(x), unwrap(y), "tl.fma")
    c, _ = arithmetic.operands(e, unwrap(z), a, "tl.fma", broadcasting=False)
    a, b, c = (cast(e, v, c.dtype) for v in (a, b, c))
    if not a.dtype.is_floating() or a.dtype.is_fp8():
        raise WrongDtype("tl.fma", str(a.type), "fp16, bf16, fp32 and fp64", "use x * y + z")
    a, b, c = arithmetic.broadcast(e, a, b, c)
    return e.op("math.fma", a.type, [a, b, c])


@builtin
def fdiv(x: Any, y: Any, ieee_rounding: Any = False) -> Tensor:
    """x / y of floats; rounded to nearest with `ieee_rounding`."""
    e = emitter()
    a, b = arithmetic.operands(e, unwrap(x), unwrap(y), "/")
    if not a.dtype.is_floating():
        raise WrongDtype("tl.fdiv", str(a.type), "floats", "use x / y, or x // y")
    if constants.flag(ieee_rounding, "ieee_rounding") and a.dtype.is_fp32():
        return e.op("mt.precise", a.type, [a, b], {"function": e.string("div")})
    return e.op("arith.divf", a.type, [a, b])


@builtin
def div_rn(x: Any, y: Any) -> Tensor:
    """x / y of fp32, rounded to nearest."""
    return fdiv(x, y, True)


@builtin
def umulhi(x: Any, y: Any) -> Tensor:
    """Upper half of the product of two integers of 32 or 64 bits, taken as unsigned."""
    e = emitter()
    a, b = arithmetic.operands(e, unwrap(x), unwrap(y), "tl.umulhi")
    if not a.dtype.is_int() or a.dtype.bits < 32:
        raise WrongDtype("tl.umulhi", str(a.type), "integers of 32 or 64 bits")
    return e.op("mt.mulhi", a.type, [a, b])


@builtin
def cdiv(x: Any, div: Any) -> Any:
    """x / div rounded up, for positive integers."""
    a, b = unwrap(x), unwrap(div)
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        divisor = constants.integer(b, "div")
        if divisor == 0:
            raise NotConstexpr("the divisor of tl.cdiv", "0", "a number other than zero")
        return -(-constants.integer(a, "x") // divisor)
    e = emitter()
    rounded = arithmetic.sub(e, arithmetic.add(e, a, b), 1)
    return arithmetic.floordiv(e, rounded, b)


@builtin
def sigmoid(x: Any) -> Tensor:
    """1 / (1 + exp(-x))."""
    e = emitter()
    value = _float_operand("tl.sigmoid", x)
    return arithmetic.truediv(e, 1.0, arithmetic.add(e, 1.0, exp(arithmetic.negate(e, value))))


@builtin
def softmax(x: Any, dim: Any = None, keep_dims: Any = False, ieee_rounding: Any = False) -> Tensor:
    """exp(x) normalised along `dim` (0 by default), computed without overflow."""
    from minitriton.frontend.lang_reduce import max, sum

    e = emitter()
    value = _float_operand("tl.softmax", x)
    axis = 0 if unwrap(dim) is None else unwrap(dim)
    shifted = arithmetic.sub(e, value, max(value, axis, keep_dims=True))
    numerator = exp(shifted)
    return fdiv(numerator, sum(numerator, axis, keep_dims=True), ieee_rounding)


@builtin
def logical_and(x: Any, y: Any) -> Tensor:
    """Elementwise `and` of truth values."""
    e = emitter()
    return arithmetic.and_(e, arithmetic.to_bool(e, x), arithmetic.to_bool(e, y))


@builtin
def logical_or(x: Any, y: Any) -> Tensor:
    """Elementwise `or` of truth values."""
    e = emitter()
    return arithmetic.or_(e, arithmetic.to_bool(e, x), arithmetic.to_bool(e, y))


def _operator(name: str, symbol: str) -> Callable[..., Any]:
    @builtin
    def function(x: Any, y: Any, sanitize_overflow: Any = False) -> Any:
        e = emitter()
        a, b = unwrap(x), unwrap(y)
        if is_number(a) and is_number(b):
            a = to_tensor(e, a)
        return arithmetic.RULES[symbol](e, a, b)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"x {symbol} y; `sanitize_overflow` changes nothing."
    return function


add = _operator("add", "+")
sub = _operator("sub", "-")
mul = _operator("mul", "*")
