"""The operator @."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    x = tl.zeros((16, 16), tl.float16)
    tl.store(p, tl.sum(x @ x))


ARGUMENTS = dict(p="*fp32", n="i32")
