"""An accumulator is widened in the loop."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    acc = tl.zeros((8,), tl.float16)
    for i in range(n):
        acc = acc + tl.load(p + tl.arange(0, 8))
    tl.store(p, tl.sum(acc))


ARGUMENTS = dict(p="*fp32", n="i32")
