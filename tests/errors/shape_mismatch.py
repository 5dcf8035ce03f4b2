"""Two tiles that do not broadcast."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    x = tl.arange(0, 8)[:, None] + tl.arange(0, 8)[None, :]
    y = x + tl.arange(0, 4)[None, :]
    tl.store(p, tl.sum(y))


ARGUMENTS = dict(p="*fp32", n="i32")
