"""None before the loop, a value in it."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    last = None
    for i in range(n):
        last = i
    tl.store(p, last)


ARGUMENTS = dict(p="*fp32", n="i32")
