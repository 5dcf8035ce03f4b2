"""An unknown keyword of a language function."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    tl.store(p, tl.load(p, maks=True))


ARGUMENTS = dict(p="*fp32", n="i32")
