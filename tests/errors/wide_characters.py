"""A mistake after wide characters."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    x, y = "漢字", tl.arange(0, 5)
    tl.store(p + y, 1.0)


ARGUMENTS = dict(p="*fp32", n="i32")
