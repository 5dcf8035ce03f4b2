"""boundary_check."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    tl.store(p, tl.load(p, boundary_check=(0,)))


ARGUMENTS = dict(p="*fp32", n="i32")
