"""A reduction axis out of range."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    x = tl.zeros((4, 4), tl.float32)
    tl.store(p, tl.sum(x, axis=2))


ARGUMENTS = dict(p="*fp32", n="i32")
