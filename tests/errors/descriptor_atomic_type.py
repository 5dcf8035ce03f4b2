"""An atomic with a tile of another type."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    desc = tl.make_tensor_descriptor(p, [n, n], [n, 1], [16, 32])
    desc.atomic_add([0, 0], tl.zeros((16, 32), tl.float16))


ARGUMENTS = dict(p="*fp32", n="i32")
