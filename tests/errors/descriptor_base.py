"""A tile of pointers as the base."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    desc = tl.make_tensor_descriptor(p + tl.arange(0, 16), [n], [1], [16])


ARGUMENTS = dict(p="*fp32", n="i32")
