"""A block of a size that no tile has."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    desc = tl.make_tensor_descriptor(p, [n, n], [n, 1], [16, 40])


ARGUMENTS = dict(p="*fp32", n="i32")
