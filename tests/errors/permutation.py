"""dims that are no permutation."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    x = tl.zeros((4, 4), tl.float32)
    tl.store(p, tl.sum(tl.permute(x, (0, 0))))


ARGUMENTS = dict(p="*fp32", n="i32")
