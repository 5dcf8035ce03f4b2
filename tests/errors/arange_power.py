"""A range of a length that no tile has."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    tl.store(p + tl.arange(0, 100), 1.0)


ARGUMENTS = dict(p="*fp32", n="i32")
