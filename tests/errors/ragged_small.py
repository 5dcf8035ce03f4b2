"""A range that is neither a power of two nor a multiple of 16."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    tl.store(p + tl.arange(0, 24), 1.0)


ARGUMENTS = dict(p="*fp32", n="i32")
