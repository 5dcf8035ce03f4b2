"""The last stride is known at run time only."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    desc = tl.make_tensor_descriptor(
        p,
        shape=[n, n],
        strides=[1, n],
        block_shape=[16, 32],
    )


ARGUMENTS = dict(p="*fp32", n="i32")
