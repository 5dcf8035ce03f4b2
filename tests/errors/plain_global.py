"""A global that is no constexpr."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


SCALE = 2.5


def kernel(p, n):
    tl.store(p, SCALE)


ARGUMENTS = dict(p="*fp32", n="i32")
