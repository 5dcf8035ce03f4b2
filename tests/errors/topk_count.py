"""More than there are."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p):
    tl.topk(tl.arange(0, 16), 32)


ARGUMENTS = dict(p="*fp32")
