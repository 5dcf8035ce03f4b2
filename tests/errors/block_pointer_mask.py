"""A mask for a block pointer."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    block = tl.make_block_ptr(p, (n, n), (n, 1), (0, 0), (16, 32), (1, 0))
    x = tl.load(block, mask=n > 0)


ARGUMENTS = dict(p="*fp32", n="i32")
