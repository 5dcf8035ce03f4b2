"""A dimension that is no power of two."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p):
    tl.sort(tl.arange(0, 48))


ARGUMENTS = dict(p="*fp32")
