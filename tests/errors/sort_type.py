"""Pointers have no order."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p):
    tl.sort(p + tl.arange(0, 16))


ARGUMENTS = dict(p="*fp32")
