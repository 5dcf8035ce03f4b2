"""Unpacking a scalar."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    a, b = n
    tl.store(p, a)


ARGUMENTS = dict(p="*fp32", n="i32")
