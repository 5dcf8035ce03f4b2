"""Which dots become warpgroup_dots on sm_90a, and the waits and barriers of their loop."""

import numpy as np
import pytest

from minitriton.ir.encoding import mem_layout
from minitriton.ir.matrix_descriptor import matrix_descriptor
from minitriton.passes.remarks import remarks_of
from minitriton.passes.shared_usage import buffer_of
from minitriton.passes.traversal import int_attribute, kernel_of, walk
from tests.passes import tile_kernels

SCALARS = {"M": "i32:16", "N": "i32:16", "K": "i32:16", "sa": "i32:16", "sb": "i32:16",
           "sc": "i32:16"}  # fmt: skip


def matmul(kernel, blocks=(128, 64, 32), dtype="fp16", out="fp32", **options):
    bm, bn, bk = blocks
    given = {"num_stages": 3, "target": "sm_90a"} | options
    return kernel(
        tile_kernels.matmul, a=f"*{dtype}", b=f"*{dtype}", c=f"*{out}", BM=bm, BN=bn, BK=bk,
        **SCALARS, **given,
    )  # fmt: skip


def ops_named(module, name):
    return [op for op in walk(kernel_of(module)) if op.name == name]


@pytest.mark.parametrize("k", [0, 32, 80, 224])
@pytest.mark.parametrize("stages", [2, 4])
def test_the_meaning_stays(kernel, stages, k):
    rng = np.random.default_rng(k)
    a, b = (rng.standard_normal(s).astype(np.float16) for s in ((128, 256), (256, 64)))
    arrays = [a, b, np.zeros((128, 64), np.float32)]
    module = matmul(kernel, num_stages=stages).check(arrays, [128, 64, k, 256, 64, 64])
    assert len(ops_named(module, "mt.warpgroup_dot")) == 1
    assert not ops_named(module, "mt.dot") and not ops_named(module, "mt.local_load")


@pytest.mark.parametrize(
    ("blocks", "options"),
    [
        ((64, 64, 64), {}),
        ((128, 128, 64), {}),
        ((256, 64, 32), {"num_warps": 8}),
        ((128, 256, 64), {"num_warps": 8}),
        ((64, 16, 16), {}),
        ((128, 64, 64), {"dtype": "bf16"}),
    ],
)
def test_operands_are_read_where_the_copies_put_them(kernel, blocks, options):
    module = matmul(kernel, blocks, **options).compile()
    (dot,) = ops_named(module, "mt.warpgroup_dot")
    assert "mt.in_flight" in dot.attributes
    for index in (0, 1):
        assert matrix_descriptor(mem_layout(dot.operands[index].type), index) is not None
        buffer = buffer_of(dot.operands[index])
        assert int_attribute(buffer, "mt.offset") % int_attribute(buffer, "mt.alignment") == 0
    assert int_attribute(module.operation, "mt.shared_alignment") == 1024


@pytest.mark.parametrize(
    ("blocks", "options"),
    [
        ((128, 64, 32), {"target": "sm_80"}),
        ((128, 64, 32), {"target": "sm_100a"}),
        ((128, 64, 32), {"num_stages": 1}),
        ((128, 64, 32), {"num_warps": 2}),
        ((64, 64, 32), {"num_warps": 8}),  # too few rows for two warpgroups
        ((32, 64, 32), {}),
        ((128, 32, 32), {"dtype": "fp32"}),  # too few rows of the transpose
        ((128, 8, 32), {}),  # rows of 16 bytes have no swizzle
        ((128, 256, 32), {}),  # 256 accumulators per thread
    ],
)
def test_everything_else_stays_on_mma_sync(kernel, blocks, options):
    module = matmul(kernel, blocks, **options).compile()
    assert not ops_named(module, "mt.warpgroup_dot") and len(ops_named(module, "mt.dot")) == 1
    assert not ops_named(module, "mt.proxy_fence")
    assert "mt.shared_alignment" not in module.operation.attributes


def half_sums(kernel, blocks, dtype="fp16", chain=False, **options):
    m, n, k = blocks
    given = {"num_stages": 3, "target": "sm_90a"} | options
    return kernel(
        tile_kernels.half_sums, x=f"*{dtype}", y=f"*{dtype}", out="*fp16", n="i32:16", CHAIN=chain,
        M=m, N=n, K=k, **given,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("blocks", "count", "options"),
    [
        ((64, 64, 32), 1, {}),
        ((128, 256, 32), 1, {}),  # fp32 sums would take all registers
        ((256, 256, 32), 1, {"num_warps": 8}),
        ((192, 256, 32), 1, {}),
        ((256, 256, 32), 0, {}),
        ((64, 384, 32), 0, {}),  # an instruction has no so many columns
        ((64, 64, 32), 0, {"num_warps": 2}),
        ((64, 64, 32), 0, {"target": "sm_80"}),
    ],
)
def test_sums_of_fp16_take_half_a_register(kernel, blocks, count, options):
    module = half_sums(kernel, blocks, **options).compile()
    assert len(ops_named(module, "mt.warpgroup_dot")) == count
    assert len(ops_named(module, "mt.dot")) == 1 - count


def test_an_instruction_has_256_columns(kernel):
    module = matmul(kernel, (64, 384, 32)).compile()
    assert not ops_named(module, "mt.warpgroup_dot")


@pytest.mark.parametrize("chain", [False, True])
def test_the_meaning_of_fp16_sums_stays(kernel, chain):
    rng = np.random.default_rng(chain)
    x, y = (rng.standard_normal(s).astype(np.float16) for s in ((64, 96), (96, 64)))
    kern = half_sums(kernel, (64, 64, 32), chain=chain)
    module = kern.check([x, y, np.zeros((64, 64), np.float16)], [96])
    assert len(ops_named(module, "mt.warpgroup_dot")) == 1 + chain


def test_the_option_turns_it_off(kernel):
    module = matmul(kernel, (128, 128, 32)).compile(wgmma=False)
    assert not ops_named(module, "mt.warpgroup_dot")
    warps = ops_named(module, "mt.dot")[0].attributes["mt.warps"]
    assert str(warps) == "array<i32: 2, 2>"


def test_the_next_products_begin_before_the_last_ones_end(kernel):
    module = matmul(kernel, (128, 128, 32), out="fp16").compile(tma=False)
    (loop,) = ops_named(module, "scf.for")
    order = [
        "mt.async_wait", "mt.proxy_fence", "mt.barrier", "mt.warpgroup_dot", "mt.warpgroup_wait",
        "mt.barrier", "mt.async_copy", "mt.async_copy", "mt.async_commit",
    ]  # fmt: skip
    assert [op.name for op in walk(loop) if op.name in order] == order
    (wait,) = ops_named(module, "mt.warpgroup_wait")
    assert int_attribute(wait, "pending") == 1
    following = [op.name for op in walk(kernel_of(module))]
    after = following[following.index("mt.warpgroup_result") :]
    # the epilogue's scratch overlaps buffers that other warps' products may still read
    assert after.index("mt.barrier") < after.index("mt.convert_layout")


def test_a_loop_that_is_not_pipelined_keeps_its_warps(kernel):
    kern = kernel(tile_kernels.in_place, a="*fp16", n="i32", B=128, num_stages=3, target="sm_90a")
    (dot,) = ops_named(kern.compile(), "mt.dot")
    assert str(dot.attributes["mt.warps"]) == "array<i32: 2, 2>"


def test_remarks_say_what_runs_on_warpgroups(kernel):
    assert any("1 dots by wgmma, 1 of them in flight" in text
               for text in remarks_of(matmul(kernel).compile()))  # fmt: skip


@pytest.mark.parametrize("call", range(6))
def test_no_wgmma_next_to_calls(kernel, call):
    """Precise and 64-bit functions, 64-bit remainders in a loop: ptxas would serialise wgmma."""
    kern = kernel(
        tile_kernels.matmul_with_a_call, a="*fp16", b="*fp16", c="*fp32", K="i32:16",
        offset="i64", CALL=call, B=64, target="sm_90a",
    )  # fmt: skip
    assert len(ops_named(kern.compile(), "mt.warpgroup_dot")) == (call in (0, 1, 4))


def test_attention_takes_its_probabilities_from_registers(kernel):
    kern = kernel(
        tile_kernels.attention, q="*fp16", k="*fp16", v="*fp16", o="*fp32", n="i32",
        BM=64, BN=32, D=32, target="sm_90a",
    )  # fmt: skip
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((n, 32)).astype(np.float16) for n in (64, 96, 96))
    module = kern.check([q, k, v, np.zeros((64, 32), np.float32)], [96])
    _, values = ops_named(module, "mt.warpgroup_dot")
    assert "tensor<64x32xf16" in str(values.operands[0].type)
    assert "mem" in str(values.operands[1].type)
