"""A nested def."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    def f(x):
        return x

    tl.store(p, f(1.0))


ARGUMENTS = dict(p="*fp32", n="i32")
