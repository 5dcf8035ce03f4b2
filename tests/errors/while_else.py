"""else on a while."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    i = 0
    while i < n:
        i += 1
    else:
        tl.store(p, 2.0)


ARGUMENTS = dict(p="*fp32", n="i32")
