"""A mistake in a device function that gets a descriptor."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


@jit
def first(desc):
    return desc.load([0, 0, 0])


def kernel(p, n):
    desc = tl.make_tensor_descriptor(p, [n, n], [n, 1], [16, 32])
    x = first(desc)


ARGUMENTS = dict(p="*fp32", n="i32")
