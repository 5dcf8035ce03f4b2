"""return in a loop."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    for i in range(n):
        if i == 3:
            return
        tl.store(p + i, i)


ARGUMENTS = dict(p="*fp32", n="i32")
