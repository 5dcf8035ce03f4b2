"""A grid axis that does not exist."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    tl.store(p, tl.program_id(3))


ARGUMENTS = dict(p="*fp32", n="i32")
