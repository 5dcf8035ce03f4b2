"""None as operand."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    tl.store(p, n + None)


ARGUMENTS = dict(p="*fp32", n="i32")
