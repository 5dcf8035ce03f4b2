"""An import."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    import math

    tl.store(p, math.pi)


ARGUMENTS = dict(p="*fp32", n="i32")
