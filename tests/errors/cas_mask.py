"""atomic_cas has no mask."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    tl.atomic_cas(p, 0.0, 1.0, mask=True)


ARGUMENTS = dict(p="*fp32", n="i32")
