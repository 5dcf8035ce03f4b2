"""A block that is no power of two."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    desc = tl.make_tensor_descriptor(p, [n, n], [n, 1], [16, 48])


ARGUMENTS = dict(p="*fp32", n="i32")
