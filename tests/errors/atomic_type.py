"""An atomic on 8-bit integers."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(q):
    tl.atomic_add(q, 1)


ARGUMENTS = dict(q="*int8")
