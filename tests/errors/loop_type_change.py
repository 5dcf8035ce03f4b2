"""acc = 0, then a float is added."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    acc = 0
    for i in range(n):
        acc += tl.load(p + i)
    tl.store(p, acc)


ARGUMENTS = dict(p="*fp32", n="i32")
