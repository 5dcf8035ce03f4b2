"""Layouts obey the laws of `verify_layouts`, accesses are wide, conversions few, results equal."""

import numpy as np
import pytest

from minitriton.ir.encoding import layout_of
from minitriton.passes.traversal import int_array, kernel_of, walk
from tests.passes import tile_kernels

RNG = np.random.default_rng(7)


def ops_named(module, name):
    return [op for op in walk(kernel_of(module)) if op.name == name]


def test_elementwise_agrees_on_one_wide_layout(kernel, names):
    kern = kernel(tile_kernels.add, x="*fp16", y="*fp32", z="*fp32", n="i32:16", BLOCK=1024)
    x, y = RNG.standard_normal(1040).astype(np.float16), RNG.standard_normal(1040, np.float32)
    module = kern.check([x, y, np.zeros(1040, np.float32)], [1040], (2, 1, 1))
    assert "mt.convert_layout" not in names(module)
    for op in ops_named(module, "mt.load"):
        assert layout_of(op.results[0].type).contiguous_registers(0).width == 8


@pytest.mark.parametrize("size", [1, 2, 16, 64, 2048])
def test_any_size(kernel, size):
    kern = kernel(tile_kernels.add, x="*fp32", y="*fp32", z="*fp32", n="i32", BLOCK=size)
    arrays = [RNG.standard_normal(size + 5).astype(np.float32) for _ in range(3)]
    kern.check(arrays, [size + 3], (2, 1, 1))


@pytest.mark.parametrize("warps", [1, 2, 8])
def test_transpose_loads_and_stores_coalesced(kernel, warps):
    kern = kernel(tile_kernels.transpose, num_warps=warps, x="*fp16", y="*fp16", N=64)
    x = RNG.standard_normal((64, 64)).astype(np.float16)
    module = kern.check([x, np.zeros_like(x)])
    (convert,) = ops_named(module, "mt.convert_layout")
    (store,) = ops_named(module, "mt.store")
    assert convert.results[0] == store.operands[1]
    assert layout_of(store.operands[1].type).contiguous_registers(1).width == 8


def test_softmax_row_needs_no_conversion(kernel, names):
    kern = kernel(tile_kernels.softmax, x="*fp32", y="*fp32", n="i32", BLOCK=512)
    x = RNG.standard_normal((3, 300)).astype(np.float32)
    module = kern.check([x, np.zeros_like(x)], [300], (3, 1, 1))
    assert "mt.convert_layout" not in names(module)


def test_control_flow_carries_one_layout(kernel):
    kern = kernel(tile_kernels.branches, x="*fp32", y="*fp32", n="i32", N=16)
    x = RNG.standard_normal((16, 16)).astype(np.float32)
    for n in (0, 2, 5):
        kern.check([x, np.zeros((5, 16, 16), np.float32)], [n])


def matmul(kernel, element="fp16", out="fp16", **blocks):
    names = {"BM": 64, "BN": 64, "BK": 32} | blocks
    return kernel(
        tile_kernels.matmul, num_stages=1, a=f"*{element}", b=f"*{element}", c=f"*{out}",
        M="i32", N="i32:16", K="i32:16", sa="i32:16", sb="i32:16", sc="i32:16", **names,
    )  # fmt: skip


def test_accumulators_of_16_bits_are_stored_in_rows_and_of_32_bits_directly(kernel):
    for out, converted in (("fp16", True), ("fp32", False)):
        module = matmul(kernel, out=out).compile()
        (store,) = ops_named(module, "mt.store")
        source = store.operands[1].owner.operation.name
        assert (source == "mt.convert_layout") == converted
        (dot,) = ops_named(module, "mt.dot")
        assert int_array(dot, "mt.warps") == [2, 2]


@pytest.mark.parametrize(
    ("element", "blocks", "tensor_core"),
    [
        ("fp16", {}, True),
        ("fp32", {}, True),
        ("fp32", {"BK": 8}, True),
        ("fp16", {"BM": 8}, True),
        ("fp64", {}, False),
    ],
)
def test_dots_without_an_instruction_run_on_fma(kernel, element, blocks, tensor_core):
    (dot,) = ops_named(matmul(kernel, element, element, **blocks).compile(), "mt.dot")
    assert ("mt.warps" in dot.attributes) == tensor_core
    assert ("mt.fma" in dot.attributes) != tensor_core


def test_the_rows_of_a_softmax_stay_in_one_warp(kernel):
    kern = kernel(
        tile_kernels.attention, q="*fp16", k="*fp16", v="*fp16", o="*fp32", n="i32",
        BM=64, BN=64, D=64,
    )  # fmt: skip
    module = kern.compile(upto="assign_layouts")
    assert [int_array(dot, "mt.warps") for dot in ops_named(module, "mt.dot")] == [[4, 1]] * 2


def test_a_sum_of_dots_has_one_layout(kernel):
    kern = kernel(
        tile_kernels.scores_in_two_parts, q="*fp16", k="*fp16", o="*fp32", BM=64, BN=64, D=32
    )
    module = kern.compile(upto="assign_layouts")
    assert [int_array(dot, "mt.warps") for dot in ops_named(module, "mt.dot")] == [[4, 1]] * 2


@pytest.mark.parametrize("keys", [64, 40])
def test_rows_stay_in_one_warp_through_a_branch(kernel, keys):
    """Else the left operand of the second product would go through shared memory."""
    kern = kernel(tile_kernels.masked_in_a_branch, x="*fp16", y="*fp16", out="*fp32", n="i32", B=64)
    x, y = (RNG.standard_normal((64, 64)).astype(np.float16) for _ in range(2))
    module = kern.check([x, y, np.zeros((64, 64), np.float32)], [keys])
    assert [int_array(dot, "mt.warps") for dot in ops_named(module, "mt.dot")] == [[4, 1]] * 2
