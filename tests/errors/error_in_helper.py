"""A mistake inside two inlined helpers."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


@jit
def helper(x):
    return x + tl.arange(0, 3)


@jit
def outer(x):
    return helper(x * 2)


def kernel(p, n):
    tl.store(p, outer(n))


ARGUMENTS = dict(p="*fp32", n="i32")
