"""A class."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    class C:
        x = 1

    tl.store(p, C.x)


ARGUMENTS = dict(p="*fp32", n="i32")
