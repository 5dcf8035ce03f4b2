"""A name assigned in a loop body only."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    for i in range(n):
        x = i * 2
    tl.store(p, x)


ARGUMENTS = dict(p="*fp32", n="i32")
