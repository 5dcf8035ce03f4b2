"""A dot of int32."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    a = tl.zeros((16, 16), tl.int32)
    tl.store(p, tl.sum(tl.dot(a, a)))


ARGUMENTS = dict(p="*fp32", n="i32")
