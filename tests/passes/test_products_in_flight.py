"""Where a pipelined loop waits for the products of its warpgroup_dots."""

import numpy as np
import pytest

from minitriton.passes.traversal import int_attribute, kernel_of, walk
from tests.passes import tile_kernels

RNG = np.random.default_rng(7)
ORDER = (
    "mt.async_wait", "mt.barrier", "mt.warpgroup_dot", "mt.warpgroup_result", "mt.warpgroup_wait",
    "mt.async_copy", "math.exp2",
)  # fmt: skip


def halves(*shapes):
    return [(RNG.standard_normal(shape) / 4).astype(np.float16) for shape in shapes]


def ops_named(module, name):
    return [op for op in walk(kernel_of(module)) if op.name == name]


def outline(module):
    """What the loop does, with the numbers of products that may be in flight after a wait."""
    (loop,) = ops_named(module, "scf.for")
    found = []
    for op in walk(loop):
        if op.name in ORDER:
            waits = op.name == "mt.warpgroup_result"
            found.append(int_attribute(op, "pending") if waits else op.name.split(".")[1])
    return [x for i, x in enumerate(found) if i == 0 or x != "async_copy" or found[i - 1] != x]


@pytest.mark.parametrize("branch", [False, True])
def test_gradient_of_attention(kernel, branch):
    """Exponentials run beside the second product; both sums run on into the next iteration, also
    where the left operand comes out of a branch."""
    kern = kernel(
        tile_kernels.attention_gradient, q="*fp16", k="*fp16", v="*fp16", do="*fp16", row="*fp32",
        dk="*fp32", dv="*fp32", n="i32", BM=32, BN=64, D=64, BRANCH=branch, target="sm_90a",
    )  # fmt: skip
    q, k, v, do = halves((96, 64), (64, 64), (64, 64), (96, 64))
    row, outs = np.ones(96, np.float32), [np.zeros((64, 64), np.float32) for _ in range(2)]
    module = kern.check([q, k, v, do, row, *outs], [96], tma=False)
    assert outline(module) == [
        "async_wait", "barrier", "warpgroup_dot", "warpgroup_dot", 1, "barrier", "async_copy",
        "exp2", "warpgroup_dot", 1, "warpgroup_dot",
    ]  # fmt: skip
    assert all("mt.in_flight" in dot.attributes for dot in ops_named(module, "mt.warpgroup_dot"))
    # q, do, and the row of numbers, whose conversion would need a barrier
    assert len(ops_named(module, "mt.local_alloc")) == 3


def test_attention(kernel):
    kern = kernel(
        tile_kernels.attention, q="*fp16", k="*fp16", v="*fp16", o="*fp32", n="i32",
        BM=64, BN=32, D=32, target="sm_90a",
    )  # fmt: skip
    q, k, v = halves((64, 32), (96, 32), (96, 32))
    module = kern.check([q, k, v, np.zeros((64, 32), np.float32)], [96], tma=False)
    assert outline(module) == [
        "async_wait", "barrier", "warpgroup_dot", 0, "barrier", "async_copy", "exp2", "exp2", 1,
        "warpgroup_dot",
    ]  # fmt: skip


def test_sums_of_fp16_as_a_left_operand(kernel):
    """A is in the registers that the next iteration's first product writes."""
    kern = kernel(
        tile_kernels.half_sums, x="*fp16", y="*fp16", out="*fp16", n="i32:16", CHAIN=True, M=64,
        N=64, K=32, target="sm_90a",
    )  # fmt: skip
    first, second = ops_named(kern.compile(tma=False), "mt.warpgroup_dot")
    assert "mt.in_flight" in first.attributes and "mt.in_flight" not in second.attributes


@pytest.mark.parametrize(
    ("form", "flying", "waits"),
    [
        (0, 2, [0, 0]),  # its sum is scaled before anything could overwrite A
        (1, 0, []),  # the next iteration would write A beside the product
        (2, 2, [0]),  # A is a product itself, hence waits for all before it
    ],
)
def test_a_in_registers(kernel, form, flying, waits):
    kern = kernel(
        tile_kernels.product_of_the_last_iteration, x="*fp16", y="*fp16", out="*fp32", n="i32",
        FORM=form, B=64, K=32, target="sm_90a",
    )  # fmt: skip
    x, y = halves((64, 64), (192, 32))
    module = kern.check([x, y, np.zeros((64, 32), np.float32)], [192])
    dots = ops_named(module, "mt.warpgroup_dot")
    assert dots and sum("mt.in_flight" in dot.attributes for dot in dots) == flying
    assert [x for x in outline(module) if isinstance(x, int)] == waits
