"""Operands of two types."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    a = tl.zeros((16, 16), tl.float16)
    b = tl.zeros((16, 16), tl.bfloat16)
    tl.store(p, tl.sum(tl.dot(a, b)))


ARGUMENTS = dict(p="*fp32", n="i32")
