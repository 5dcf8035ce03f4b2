"""Two shapes in two branches."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    x = tl.arange(0, 8)
    if n > 3:
        x = tl.arange(0, 16)
    tl.store(p, tl.sum(x))


ARGUMENTS = dict(p="*fp32", n="i32")
