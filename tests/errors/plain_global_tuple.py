"""A global tuple."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


SIZES = (2, 4)


def kernel(p, n):
    tl.store(p, SIZES[0])


ARGUMENTS = dict(p="*fp32", n="i32")
