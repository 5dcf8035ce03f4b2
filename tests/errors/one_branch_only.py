"""A name assigned in one branch."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    if n > 3:
        x = 1.0
    tl.store(p, x)


ARGUMENTS = dict(p="*fp32", n="i32")
