"""// of signed and unsigned."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n, m):
    tl.store(p, n // m)


ARGUMENTS = dict(p="*fp32", n="i32", m="u32")
