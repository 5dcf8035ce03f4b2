"""A static assertion on a run-time value."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    tl.static_assert(n > 0)


ARGUMENTS = dict(p="*fp32", n="i32")
