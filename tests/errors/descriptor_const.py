"""A store through a const pointer."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    desc = tl.make_tensor_descriptor(p, [n, n], [n, 1], [16, 32])
    desc.store([0, 0], tl.zeros((16, 32), tl.float32))


ARGUMENTS = dict(p="*kfp32", n="i32")
