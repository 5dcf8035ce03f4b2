"""A hint of the wrong rank."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    x = tl.multiple_of(tl.arange(0, 8), (8, 8))
    tl.store(p + x, 1.0)


ARGUMENTS = dict(p="*fp32", n="i32")
