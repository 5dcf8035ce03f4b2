"""A constexpr function that raises."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


@tl.constexpr_function
def check(x):
    raise ValueError("only odd numbers")


def kernel(p, n):
    tl.store(p, check(4))


ARGUMENTS = dict(p="*fp32", n="i32")
