"""del."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    x = 1.0
    del x
    tl.store(p, 1.0)


ARGUMENTS = dict(p="*fp32", n="i32")
