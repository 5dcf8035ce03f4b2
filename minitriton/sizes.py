"""Small arithmetic for grids and block sizes on the host."""

from __future__ import annotations


def cdiv(x: int, y: int) -> int:
    """`x / y` rounded up, for integers with y > 0."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`; 1 for n <= 1."""
    return 1 << (n - 1).bit_length() if n > 1 else 1


for _fn in (cdiv, next_power_of_2):  # kernels may call them on compile-time values
    setattr(_fn, "__mt_constexpr__", True)  # noqa: B010  (functions are not typed to have it)
