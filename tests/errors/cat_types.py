"""Tiles of two element types, which Triton does not concatenate either."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, q):
    i = tl.arange(0, 16)
    tl.cat(tl.load(p + i), tl.load(q + i))


ARGUMENTS = dict(p="*fp32", q="*bf16")
