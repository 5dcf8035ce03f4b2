"""An unknown cache modifier."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    tl.store(p, tl.load(p, cache_modifier=".gc"))


ARGUMENTS = dict(p="*fp32", n="i32")
