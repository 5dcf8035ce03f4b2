"""More ':' than dimensions."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    x = tl.arange(0, 8)
    tl.store(p, tl.sum(x[:, :, None]))


ARGUMENTS = dict(p="*fp32", n="i32")
