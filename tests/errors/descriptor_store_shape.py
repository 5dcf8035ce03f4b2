"""A tile of another shape than the block's."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    desc = tl.make_tensor_descriptor(p, [n, n], [n, 1], [16, 32])
    desc.store([0, 0], tl.zeros((32, 16), tl.float32))


ARGUMENTS = dict(p="*fp32", n="i32")
