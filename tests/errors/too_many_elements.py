"""A tile beyond the limit."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    x = tl.zeros((2048, 1024), tl.float32)
    tl.store(p, tl.sum(x))


ARGUMENTS = dict(p="*fp32", n="i32")
