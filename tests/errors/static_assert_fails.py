"""A failing static assertion."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, BLOCK):
    tl.static_assert(BLOCK % 32 == 0, f"BLOCK is {BLOCK}")


ARGUMENTS = dict(p="*fp32", BLOCK=48)
