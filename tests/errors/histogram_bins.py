"""A histogram with a number of bins that tiles cannot have."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p):
    tl.histogram(tl.arange(0, 16), 10)


ARGUMENTS = dict(p="*fp32")
