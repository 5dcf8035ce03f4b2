"""The loop variable after the loop."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    for i in range(n):
        tl.store(p + i, 1.0)
    tl.store(p, i)


ARGUMENTS = dict(p="*fp32", n="i32")
