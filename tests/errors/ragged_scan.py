"""A prefix sum along 48 elements."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    x = tl.load(p + tl.arange(0, 48))
    tl.store(p + tl.arange(0, 48), tl.cumsum(x, 0))


ARGUMENTS = dict(p="*fp32", n="i32")
