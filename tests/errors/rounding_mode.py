"""A rounding mode for a widening cast."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    tl.store(p, tl.load(p).to(tl.float64, fp_downcast_rounding="rtz"))


ARGUMENTS = dict(p="*fp32", n="i32")
