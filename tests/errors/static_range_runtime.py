"""static_range with a run-time bound."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    for i in tl.static_range(n):
        tl.store(p + i, i)


ARGUMENTS = dict(p="*fp32", n="i32")
