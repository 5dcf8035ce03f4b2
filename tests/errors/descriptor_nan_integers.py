"""NaN padding of integers."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    desc = tl.make_tensor_descriptor(p, [n], [1], [16], padding_option="nan")


ARGUMENTS = dict(p="*i32", n="i32")
