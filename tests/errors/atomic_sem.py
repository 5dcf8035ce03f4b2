"""An unknown memory order."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    tl.atomic_add(p, 1.0, sem="relax")


ARGUMENTS = dict(p="*fp32", n="i32")
