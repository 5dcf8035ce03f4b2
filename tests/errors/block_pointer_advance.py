"""tl.advance of a plain pointer."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    q = tl.advance(p, (16,))


ARGUMENTS = dict(p="*fp32", n="i32")
