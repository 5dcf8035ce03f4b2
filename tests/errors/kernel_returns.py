"""A kernel returning a value."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    return n + 1


ARGUMENTS = dict(p="*fp32", n="i32")
