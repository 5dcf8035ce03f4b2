"""Three results for pairs."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


@jit
def f(x, y):
    return x, y, x + y


def kernel(p, q):
    x = tl.arange(0, 32)
    tl.map_elementwise(f, x, pack=2)


ARGUMENTS = dict(p="*fp32", q="*u8")
