"""Indices that are no integers."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p):
    x = tl.load(p + tl.arange(0, 16))
    tl.gather(x, x, 0)


ARGUMENTS = dict(p="*fp32")
