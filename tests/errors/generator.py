"""A generator expression."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    tl.store(p, sum(x for x in (1.0, 2.0)))


ARGUMENTS = dict(p="*fp32", n="i32")
