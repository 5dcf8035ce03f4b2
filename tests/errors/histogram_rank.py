"""A histogram of a tile of rank 2."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p):
    tl.histogram(tl.zeros((4, 16), tl.int32), 16)


ARGUMENTS = dict(p="*fp32")
