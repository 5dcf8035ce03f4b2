"""A bitcast to another width."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    tl.store(p, tl.load(p).to(tl.int16, bitcast=True))


ARGUMENTS = dict(p="*fp32", n="i32")
