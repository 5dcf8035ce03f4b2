"""yield."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    yield n


ARGUMENTS = dict(p="*fp32", n="i32")
