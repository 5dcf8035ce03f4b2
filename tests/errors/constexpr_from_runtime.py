"""A constexpr annotation on a run-time value."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    size: tl.constexpr = n * 2
    tl.store(p, 1.0)


ARGUMENTS = dict(p="*fp32", n="i32")
