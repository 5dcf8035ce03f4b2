"""A store to a const pointer."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(q):
    tl.store(q, 1.0)


ARGUMENTS = dict(q="*kfp32")
