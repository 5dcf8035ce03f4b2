"""A call of a function of Python's math."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


import math


def kernel(p, n):
    tl.store(p, math.sqrt(n))


ARGUMENTS = dict(p="*fp32", n="i32")
