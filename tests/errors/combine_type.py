"""A combine function that changes the type."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


@jit
def f(a, b):
    return a * 0.5 + b


def kernel(p, n):
    x = tl.arange(0, 8)
    tl.store(p, tl.reduce(x, 0, f))


ARGUMENTS = dict(p="*fp32", n="i32")
