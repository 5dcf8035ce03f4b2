"""A transcendental function of fp16."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p):
    tl.store(p, tl.exp(tl.load(p)))


ARGUMENTS = dict(p="*fp16")
