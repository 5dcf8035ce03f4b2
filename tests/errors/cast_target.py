"""A cast to something that is no type."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    tl.store(p, n.to(3))


ARGUMENTS = dict(p="*fp32", n="i32")
