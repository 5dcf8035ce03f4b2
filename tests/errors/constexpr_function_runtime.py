"""A run-time value for a constexpr function."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


@tl.constexpr_function
def double(x):
    return 2 * x


def kernel(p, n):
    tl.store(p, double(n))


ARGUMENTS = dict(p="*fp32", n="i32")
