"""Two rows of 48, one after the other."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    x = tl.load(p + tl.arange(0, 48))
    tl.store(p + tl.arange(0, 96), tl.cat(x, x))


ARGUMENTS = dict(p="*fp32", n="i32")
