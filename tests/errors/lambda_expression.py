"""A lambda."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    f = lambda x: x + 1
    tl.store(p, f(n))


ARGUMENTS = dict(p="*fp32", n="i32")
