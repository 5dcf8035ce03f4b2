"""A block pointer that changes its shape in a loop."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    block = tl.make_block_ptr(p, (n, n), (n, 1), (0, 0), (16, 32), (1, 0))
    for i in range(n):
        x = tl.load(block)
        block = tl.make_block_ptr(p, (n, n), (n, 1), (i, 0), (16, 64), (1, 0))


ARGUMENTS = dict(p="*fp32", n="i32")
