"""A misspelt name."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    offset = n * 4
    tl.store(p + ofset, 1.0)


ARGUMENTS = dict(p="*fp32", n="i32")
