"""A broadcast that does not fit."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    tl.store(p, tl.sum(tl.broadcast_to(tl.arange(0, 8), (4, 4))))


ARGUMENTS = dict(p="*fp32", n="i32")
