"""boundary_check of a dimension that is not there."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    block = tl.make_block_ptr(p, (n, n), (n, 1), (0, 0), (16, 32), (1, 0))
    x = tl.load(block, boundary_check=(0, 2))


ARGUMENTS = dict(p="*fp32", n="i32")
