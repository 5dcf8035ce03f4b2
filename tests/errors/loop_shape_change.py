"""A scalar accumulator becomes a tile."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    acc = 0.0
    for i in range(n):
        acc += tl.load(p + tl.arange(0, 8))
    tl.store(p, tl.sum(acc))


ARGUMENTS = dict(p="*fp32", n="i32")
