"""Six dimensions."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    desc = tl.make_tensor_descriptor(p, (n, n, n, n, n, n), (n, n, n, n, n, 1), (1, 1, 1, 1, 1, 16))


ARGUMENTS = dict(p="*fp32", n="i32")
