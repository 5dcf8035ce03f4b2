"""A histogram of floats."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p):
    x = tl.load(p + tl.arange(0, 16))
    tl.histogram(x, 16)


ARGUMENTS = dict(p="*fp32")
