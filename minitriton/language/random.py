"""Random numbers from (seed, offset) by Philox-4x32-10: the same streams as Triton's.

Each function is pure: equal seeds and offsets give equal numbers. `seed` is a scalar, `offset` an
integer tile (one stream of four words for each element).
"""

# mypy: ignore-errors
# (the functions are read by our compiler, not run by Python)
from __future__ import annotations

import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction
from minitriton.frontend.values import constexpr

ROUNDS = constexpr(10)


@DeviceFunction
def philox_impl(c0, c1, c2, c3, k0, k1, n_rounds: constexpr = ROUNDS):
    """`n_rounds` rounds on four uint32 (or uint64) counters with two key words."""
    if c0.dtype == tl.uint32:
        key_step_0: constexpr = 0x9E3779B9
        key_step_1: constexpr = 0xBB67AE85
        multiplier_0: constexpr = 0xD2511F53
        multiplier_1: constexpr = 0xCD9E8D57
    else:
        tl.static_assert(c0.dtype == tl.uint64, "philox takes uint32 or uint64")
        key_step_0: constexpr = 0x9E3779B97F4A7C15
        key_step_1: constexpr = 0xBB67AE8584CAA73B
        multiplier_0: constexpr = 0xD2E7470EE14C6C93
        multiplier_1: constexpr = 0xCA5A826395121157
    for _ in tl.static_range(n_rounds):
        high_0, low_0 = tl.umulhi(c0, multiplier_0), c0 * multiplier_0
        high_1, low_1 = tl.umulhi(c2, multiplier_1), c2 * multiplier_1
        c0 = high_1 ^ c1 ^ k0
        c2 = high_0 ^ c3 ^ k1
        c1 = low_1
        c3 = low_0
        k0 = k0 + key_step_0
        k1 = k1 + key_step_1
    return c0, c1, c2, c3


@DeviceFunction
def philox(seed, c0, c1, c2, c3, n_rounds: constexpr = ROUNDS):
    """Four random words for counters c0..c3 and a 64-bit seed."""
    seed = tl.to_tensor(seed).to(tl.uint64)
    c0, c1, c2, c3 = tl.to_tensor(c0), tl.to_tensor(c1), tl.to_tensor(c2), tl.to_tensor(c3)
    if c0.dtype.primitive_bitwidth == 32:
        word: constexpr = tl.uint32
        high = (seed >> 32).to(tl.uint32)
        low = seed.to(tl.uint32)
    else:
        tl.static_assert(c0.dtype.primitive_bitwidth == 64, "counters have 32 or 64 bits")
        word: constexpr = tl.uint64
        high = tl.zeros_like(seed)
        low = seed
    return philox_impl(
        c0.to(word, bitcast=True),
        c1.to(word, bitcast=True),
        c2.to(word, bitcast=True),
        c3.to(word, bitcast=True),
        low,
        high,
        n_rounds,
    )


@DeviceFunction
def randint4x(seed, offset, n_rounds: constexpr = ROUNDS):
    """Four blocks of random uint32 for an int32 or int64 `offset`."""
    offset = tl.to_tensor(offset)
    low = offset.to(tl.uint32)
    zero = low * 0
    if offset.dtype.primitive_bitwidth > 32:
        high = (offset >> 32).to(tl.uint32)
    else:
        high = zero
    return philox(seed, low, high, zero, zero, n_rounds)


@DeviceFunction
def randint(seed, offset, n_rounds: constexpr = ROUNDS):
    """Random uint32."""
    first, _, _, _ = randint4x(seed, offset, n_rounds)
    return first


@DeviceFunction
def uint_to_uniform_float(x):
    """Random bits as a float in [0, 1)."""
    if x.dtype.primitive_bitwidth == 32:
        signed = x.to(tl.int32, bitcast=True)
        scale: constexpr = 4.6566127342e-10
    else:
        tl.static_assert(x.dtype.primitive_bitwidth == 64, "random words have 32 or 64 bits")
        signed = x.to(tl.int64, bitcast=True)
        scale: constexpr = 1.0842020432385337e-19
    return tl.where(signed < 0, -signed - 1, signed) * scale


@DeviceFunction
def rand(seed, offset, n_rounds: constexpr = ROUNDS):
    """Random fp32, uniform in [0, 1)."""
    return uint_to_uniform_float(randint(seed, offset, n_rounds))


@DeviceFunction
def rand4x(seed, offsets, n_rounds: constexpr = ROUNDS):
    """Four blocks of random fp32, uniform in [0, 1)."""
    i0, i1, i2, i3 = randint4x(seed, offsets, n_rounds)
    return (
        uint_to_uniform_float(i0),
        uint_to_uniform_float(i1),
        uint_to_uniform_float(i2),
        uint_to_uniform_float(i3),
    )


@DeviceFunction
def pair_uniform_to_normal(u1, u2):
    """Two normal variates of two uniform ones (Box and Muller)."""
    u1 = tl.maximum(1.0e-7, u1)
    angle = 6.283185307179586 * u2
    radius = tl.sqrt(-2.0 * tl.log(u1))
    return radius * tl.cos(angle), radius * tl.sin(angle)


@DeviceFunction
def randn(seed, offset, n_rounds: constexpr = ROUNDS):
    """Random fp32, normal with mean 0 and variance 1."""
    i0, i1, _, _ = randint4x(seed, offset, n_rounds)
    first, _ = pair_uniform_to_normal(uint_to_uniform_float(i0), uint_to_uniform_float(i1))
    return first


@DeviceFunction
def randn4x(seed, offset, n_rounds: constexpr = ROUNDS):
    """Four blocks of random fp32, normal with mean 0 and variance 1."""
    u0, u1, u2, u3 = rand4x(seed, offset, n_rounds)
    n0, n1 = pair_uniform_to_normal(u0, u1)
    n2, n3 = pair_uniform_to_normal(u2, u3)
    return n0, n1, n2, n3
