"""A module attribute that does not exist."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


import math


def kernel(p, n):
    tl.store(p, math.pie)


ARGUMENTS = dict(p="*fp32", n="i32")
