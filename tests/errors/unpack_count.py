"""Unpacking into too many names."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    a, b, c = (n, 2)
    tl.store(p, a)


ARGUMENTS = dict(p="*fp32", n="i32")
