"""split of a dimension that is not 2."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    a, b = tl.split(tl.zeros((4, 4), tl.float32))
    tl.store(p, tl.sum(a))


ARGUMENTS = dict(p="*fp32", n="i32")
