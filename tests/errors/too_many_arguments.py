"""Too many arguments for a helper."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


@jit
def f(x, y=1):
    return x + y


def kernel(p, n):
    tl.store(p, f(n, 2, 3))


ARGUMENTS = dict(p="*fp32", n="i32")
