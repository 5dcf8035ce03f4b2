"""Augmented assignment to an element."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    x = tl.zeros((8,), tl.float32)
    x[0] += 1.0


ARGUMENTS = dict(p="*fp32", n="i32")
