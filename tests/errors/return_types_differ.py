"""A helper returning two types."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


@jit
def f(x):
    if x > 3:
        return 1
    return tl.arange(0, 4)


def kernel(p, n):
    tl.store(p, f(n))


ARGUMENTS = dict(p="*fp32", n="i32")
