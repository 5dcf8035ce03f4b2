"""A dynamic break in an unrolled loop."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    for i in tl.static_range(4):
        if n == i:
            break
        tl.store(p + i, i)


ARGUMENTS = dict(p="*fp32", n="i32")
