"""A loop over a scalar."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    for i in n:
        tl.store(p, i)


ARGUMENTS = dict(p="*fp32", n="i32")
