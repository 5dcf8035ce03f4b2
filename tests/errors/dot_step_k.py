"""An fp8 product of depth 48."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    a = tl.zeros((64, 48), tl.float8e4nv)
    b = tl.zeros((48, 64), tl.float8e4nv)
    x = tl.dot(a, b)


ARGUMENTS = dict(p="*fp32", n="i32")
