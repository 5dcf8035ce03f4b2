"""Indices that differ from the source in another dimension."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p):
    i, j = tl.arange(0, 16), tl.arange(0, 32)
    x = tl.load(p + i[:, None] * 32 + j[None, :])
    tl.gather(x, tl.zeros((8, 16), tl.int32), 1)


ARGUMENTS = dict(p="*fp32")
