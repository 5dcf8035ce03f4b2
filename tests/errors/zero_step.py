"""A loop with step zero."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    for i in range(0, n, 0):
        tl.store(p, i)


ARGUMENTS = dict(p="*fp32", n="i32")
