"""Libdevice's functions of bits and signs, and arithmetic that is not fused."""

# mypy: ignore-errors
# (the functions are read by our compiler, not run by Python)
from __future__ import annotations

import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction


@DeviceFunction
def _bits(x):
    """A float's bits as a signed integer of its width."""
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
    return bits


@DeviceFunction
def signbit(x):
    """1 where the sign bit of a float is set (-0.0, too), else 0: int32."""
    return (_bits(x) < 0).to(tl.int32)


@DeviceFunction
def copysign(x, y):
    """x with the sign of y."""
    return tl.where((_bits(x) < 0) == (_bits(y) < 0), x, -x)


@DeviceFunction
def float_as_int(x):
    """The bits of fp32 as int32."""
    return x.to(tl.int32, bitcast=True)


@DeviceFunction
def float_as_uint(x):
    """The bits of fp32 as uint32."""
    return x.to(tl.uint32, bitcast=True)


@DeviceFunction
def int_as_float(x):
    """int32 as the bits of fp32."""
    return x.to(tl.float32, bitcast=True)


@DeviceFunction
def uint_as_float(x):
    """uint32 as the bits of fp32."""
    return x.to(tl.float32, bitcast=True)


@DeviceFunction
def double_as_longlong(x):
    """The bits of fp64 as int64."""
    return x.to(tl.int64, bitcast=True)


@DeviceFunction
def longlong_as_double(x):
    """int64 as the bits of fp64."""
    return x.to(tl.float64, bitcast=True)


@DeviceFunction
def _counted(NAME: tl.constexpr, x):
    """An instruction that counts bits of 32- and 64-bit integers: int32."""
    if x.dtype.primitive_bitwidth == 64:
        count = tl.inline_asm_elementwise(
            NAME + ".b64 $0, $1;", "=r,l", [x], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        tl.static_assert(x.dtype.primitive_bitwidth == 32, "32- or 64-bit integers")
        count = tl.inline_asm_elementwise(
            NAME + ".b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
        )
    return count


@DeviceFunction
def popc(x):
    """How many bits of an integer are set: int32."""
    return _counted("popc", x)


@DeviceFunction
def clz(x):
    """Zeros before the highest bit that is set: int32."""
    return _counted("clz", x)


@DeviceFunction
def ffs(x):
    """Place of the lowest bit that is set, counted from 1; 0 for 0: int32."""
    return tl.where(x == 0, 0, x.dtype.primitive_bitwidth - clz(x & -x))


@DeviceFunction
def brev(x):
    """The bits in reverse order."""
    if x.dtype.primitive_bitwidth == 64:
        turned = tl.inline_asm_elementwise(
            "brev.b64 $0, $1;", "=l,l", [x], dtype=x.dtype, is_pure=True, pack=1
        )
    else:
        tl.static_assert(x.dtype.primitive_bitwidth == 32, "32- or 64-bit integers")
        turned = tl.inline_asm_elementwise(
            "brev.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=1
        )
    return turned


@DeviceFunction
def ldexp(x, n):
    """x * 2**n, exact unless the result is subnormal; n is int32."""
    if x.dtype == tl.float64:
        half = tl.minimum(tl.maximum(n, -2044), 2044) >> 1
        rest = tl.minimum(tl.maximum(n - half, -1022), 1022)
        low = ((half + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)
        high = ((rest + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    else:
        half = tl.minimum(tl.maximum(n, -252), 252) >> 1
        rest = tl.minimum(tl.maximum(n - half, -126), 126)
        low = ((half + 127).to(tl.int32) << 23).to(tl.float32, bitcast=True)
        high = ((rest + 127).to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return x * low * high


@DeviceFunction
def _exactly(NAME: tl.constexpr, x, y):
    """One instruction of two floats, which no compiler merges with another."""
    if x.dtype == tl.float64:
        result = tl.inline_asm_elementwise(
            NAME + ".rn.f64 $0, $1, $2;", "=d,d,d", [x, y], dtype=tl.float64, is_pure=True, pack=1
        )
    else:
        result = tl.inline_asm_elementwise(
            NAME + ".rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )
    return result


@DeviceFunction
def add_rn(x, y):
    """x + y, never part of an fma."""
    return _exactly("add", x, y)


@DeviceFunction
def sub_rn(x, y):
    """x - y, never part of an fma."""
    return _exactly("sub", x, y)


@DeviceFunction
def mul_rn(x, y):
    """x * y, never part of an fma."""
    return _exactly("mul", x, y)
