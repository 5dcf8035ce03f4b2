"""**kwargs in a helper."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


@jit
def f(x, **options):
    tl.store(x, 1.0)


def kernel(p, n):
    f(p)


ARGUMENTS = dict(p="*fp32", n="i32")
