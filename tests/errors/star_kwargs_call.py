"""** in a call."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    tl.store(p, 1.0, **{})


ARGUMENTS = dict(p="*fp32", n="i32")
