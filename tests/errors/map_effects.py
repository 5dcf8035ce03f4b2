"""A function of scalars that stores."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


@jit
def f(pointer, x):
    if x > 3:
        tl.store(pointer, x)
    return x


def kernel(p, q):
    x = tl.arange(0, 32)
    tl.map_elementwise(f, p + x, x)


ARGUMENTS = dict(p="*fp32", q="*u8")
