"""Two block shapes under one name."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    if n > 4:
        desc = tl.make_tensor_descriptor(p, [n, n], [n, 1], [16, 32])
    else:
        desc = tl.make_tensor_descriptor(p, [n, n], [n, 1], [32, 16])
    x = desc.load([0, 0])


ARGUMENTS = dict(p="*fp32", n="i32")
