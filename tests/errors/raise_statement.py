"""raise."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    raise ValueError("no")


ARGUMENTS = dict(p="*fp32", n="i32")
