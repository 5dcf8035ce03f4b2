"""A negative literal against an unsigned value."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, m):
    tl.store(p, m + -1)


ARGUMENTS = dict(p="*fp32", m="u32")
