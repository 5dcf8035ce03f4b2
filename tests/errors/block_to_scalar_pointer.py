"""A tile stored to a scalar pointer."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    tl.store(p, tl.arange(0, 8))


ARGUMENTS = dict(p="*fp32", n="i32")
