"""A dictionary."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    d = {"a": 1.0}
    tl.store(p, d["a"])


ARGUMENTS = dict(p="*fp32", n="i32")
