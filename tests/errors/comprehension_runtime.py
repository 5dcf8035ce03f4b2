"""A comprehension over a run-time range."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    x = [i for i in range(n)]
    tl.store(p, x[0])


ARGUMENTS = dict(p="*fp32", n="i32")
