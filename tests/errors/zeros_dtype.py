"""A misspelt dtype."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    x = tl.zeros((4,), "float31")
    tl.store(p, tl.sum(x))


ARGUMENTS = dict(p="*fp32", n="i32")
