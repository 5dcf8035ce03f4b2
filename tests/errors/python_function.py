"""A call of a plain Python function."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def scale(x):
    return x * 2


def kernel(p, n):
    tl.store(p, scale(n))


ARGUMENTS = dict(p="*fp32", n="i32")
