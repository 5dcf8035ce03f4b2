"""Recursion without an end."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


@jit
def f(x):
    return f(x + 1)


def kernel(p, n):
    tl.store(p, f(n))


ARGUMENTS = dict(p="*fp32", n="i32")
