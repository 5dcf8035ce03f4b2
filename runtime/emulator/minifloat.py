"""The 8-bit formats e4m3 and e5m2: decoding by table, encoding by exact rounding."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from minitriton.runtime.emulator.formats import F32, F64, FORMATS, Bits, narrow

NAMES = ("e4m3", "e5m2")


@cache
def table(name: str) -> NDArray[np.float32]:
    """Float32 value of each of the 256 patterns of a format."""
    fmt = FORMATS[name]
    pattern = np.arange(256)
    exponent = (pattern & 0x7F) >> fmt.mantissa
    fraction = pattern & ((1 << fmt.mantissa) - 1)
    significand = np.where(exponent > 0, fraction + (1 << fmt.mantissa), fraction)
    scale = np.maximum(exponent, 1) - 1 + fmt.least_exponent - fmt.mantissa
    value = np.ldexp(significand.astype(F64), scale)
    if name == "e5m2":
        value = np.where((pattern & 0x7F) == 0x7C, np.inf, value)
        value = np.where((pattern & 0x7F) > 0x7C, np.nan, value)
    else:
        value = np.where((pattern & 0x7F) == 0x7F, np.nan, value)
    out = np.where(pattern & 0x80, -value, value).astype(F32)
    out.flags.writeable = False
    return out


def decode(bits: Bits, name: str) -> NDArray[np.float32]:
    """uint8 patterns to float32 values."""
    return table(name)[bits]


def encode(value: NDArray[np.float64], name: str) -> NDArray[np.uint8]:
    """Float64 values to patterns, to nearest even, saturating to the largest finite value."""
    return narrow(value, FORMATS[name], "rn", satfinite=True)
