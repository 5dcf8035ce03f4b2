"""A comparison of pointers."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    tl.store(p, p == p)


ARGUMENTS = dict(p="*fp32", n="i32")
