"""An unknown input precision."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    a = tl.zeros((16, 16), tl.float32)
    tl.store(p, tl.sum(tl.dot(a, a, input_precision="tf32x4")))


ARGUMENTS = dict(p="*fp32", n="i32")
