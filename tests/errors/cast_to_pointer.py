"""A float cast to a pointer."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    tl.store(tl.load(p).to(tl.pointer_type(tl.float32)), 1.0)


ARGUMENTS = dict(p="*fp32", n="i32")
