"""A load from an integer."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    tl.store(p, tl.load(n))


ARGUMENTS = dict(p="*fp32", n="i32")
