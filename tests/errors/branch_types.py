"""int in one branch, float in the other."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    if n > 3:
        x = 1
    else:
        x = tl.load(p)
    tl.store(p, x)


ARGUMENTS = dict(p="*fp32", n="i32")
