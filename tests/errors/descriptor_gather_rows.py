"""Fewer rows than a gather has."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    desc = tl.make_tensor_descriptor(p, [n, n], [n, 1], [1, 32])
    x = desc.gather(tl.arange(0, 4), 0)


ARGUMENTS = dict(p="*fp32", n="i32")
