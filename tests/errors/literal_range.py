"""A literal that does not fit."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, m):
    tl.store(p, m + 300)


ARGUMENTS = dict(p="*fp32", m="i8")
