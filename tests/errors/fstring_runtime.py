"""A run-time value in an f-string."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    tl.static_print(f"{n}")


ARGUMENTS = dict(p="*fp32", n="i32")
