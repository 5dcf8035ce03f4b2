"""Rows that are no multiple of 16 bytes."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    desc = tl.make_tensor_descriptor(p, [n, 15], [15, 1], [16, 16])


ARGUMENTS = dict(p="*fp32", n="i32")
