"""A misspelt function of the language."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    tl.store(p + tl.arrange(0, 4), 1.0)


ARGUMENTS = dict(p="*fp32", n="i32")
