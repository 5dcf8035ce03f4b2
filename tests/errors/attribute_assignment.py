"""Assignment to an attribute."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    n.value = 3
    tl.store(p, n)


ARGUMENTS = dict(p="*fp32", n="i32")
