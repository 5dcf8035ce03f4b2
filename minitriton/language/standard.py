"""Library functions written in the language itself, and what kernels look for among them."""

# mypy: ignore-errors
# (the functions are read by our compiler, not run by Python)
from __future__ import annotations

from typing import Any

from minitriton.frontend.source import DeviceFunction, constexpr_function


def __getattr__(name: str) -> Any:
    from minitriton import language

    if name in language.__all__:
        return getattr(language, name)
    raise AttributeError(f"module 'minitriton.language.standard' has no attribute {name!r}")


@constexpr_function
def _log2(i):
    """The exponent of a power of two, while compiling."""
    return i.bit_length() - 1


@constexpr_function
def _is_power_of_two(i):
    """Whether a constant is a power of two."""
    return i > 0 and i & (i - 1) == 0


@DeviceFunction
def swizzle2d(i, j, size_i, size_j, size_g):
    """Indices (i, j) of a row-major size_i x size_j grid regrouped in column-major bands.

    Bands are `size_g` rows high: neighbouring programs then share data in L2.
    """
    linear = i * size_j + j
    in_band = size_g * size_j
    band = linear // in_band
    first_row = band * size_g
    height = _smaller(size_i - first_row, size_g)
    within = linear % in_band
    return first_row + within % height, within // height


@DeviceFunction
def _smaller(a, b):
    return min(a, b)
