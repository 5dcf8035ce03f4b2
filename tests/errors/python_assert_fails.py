"""A failing assert on constants."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, BLOCK):
    assert BLOCK == 32, "only 32"


ARGUMENTS = dict(p="*fp32", BLOCK=48)
