"""Kernels wait before anything else for the one ahead of them, unless they say when themselves."""

import numpy as np
import pytest

import minitriton.language as tl
from minitriton.passes.grid_overlap import ATTRIBUTE
from minitriton.passes.traversal import kernel_of, ops_of, walk
from tests.passes import tile_kernels
from tests.passes.test_ping_pong import product as product_in_turns
from tests.passes.test_warp_split import product


def waits(x, n):
    tl.store(x + n, 1.0)
    tl.extra.cuda.gdc_wait()
    tl.store(x, 2.0)


def starts(x, n):
    tl.store(x, 2.0)
    tl.extra.cuda.gdc_launch_dependents()


def first(module):
    return ops_of(kernel_of(module).regions[0].blocks[0])[0].name


def grid_ops(module):
    return [op.name for op in walk(module.operation) if op.name.startswith("mt.grid_")]


def softmax(kernel, target="sm_90a"):
    return kernel(tile_kernels.softmax, target=target, x="*fp32", y="*fp32", n="i32", BLOCK=64)


@pytest.mark.parametrize("overlap", [None, True])
def test_a_wait_goes_first(kernel, overlap):
    kern, n = softmax(kernel), 50
    x = np.random.default_rng().standard_normal((3, n), np.float32)
    module = kern.check([x, np.zeros_like(x)], (n,), (3, 1, 1), overlap=overlap)
    assert first(module) == "mt.grid_wait" and grid_ops(module) == ["mt.grid_wait"]
    assert ATTRIBUTE in module.operation.attributes


@pytest.mark.parametrize(
    ("target", "overlap"), [("sm_80", True), ("sm_89", None), ("sm_90a", False)]
)
def test_not_where_the_gpu_or_the_caller_does_without(kernel, target, overlap):
    module = softmax(kernel, target).compile(overlap=overlap)
    assert not grid_ops(module) and ATTRIBUTE not in module.operation.attributes


@pytest.mark.parametrize("make", [product, product_in_turns])
def test_all_warps_wait(kernel, make):
    """The producer's too: the wait is ahead of where warps part."""
    module = make(kernel).compile()
    names = [op.name for op in ops_of(kernel_of(module).regions[0].blocks[0])]
    assert names[0] == "mt.grid_wait" and "mt.split_warps" in names
    assert grid_ops(module) == ["mt.grid_wait"]


@pytest.mark.parametrize("function", [waits, starts])
def test_kernels_that_say_when_are_left_to_the_launch(kernel, function):
    kern = kernel(function, target="sm_90a", x="*fp32", n="i32")
    module = kern.compile()
    assert len(grid_ops(module)) == 1 and ATTRIBUTE not in module.operation.attributes
    module = kern.compile(overlap=True)
    assert ATTRIBUTE in module.operation.attributes
    if function is waits:
        assert grid_ops(module) == ["mt.grid_wait"] and first(module) != "mt.grid_wait"
    else:
        assert grid_ops(module) == ["mt.grid_wait", "mt.grid_launch"]
        assert first(module) == "mt.grid_wait"
