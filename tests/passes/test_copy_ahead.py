"""Loops of loads without dots are read ahead where they ask for it and that is proved right."""

import numpy as np
import pytest

from minitriton.passes.remarks import remarks_of
from minitriton.passes.traversal import kernel_of, walk
from tests.passes import tile_kernels


def log_sum_exp(kernel, stages=3, dtype="fp32", size="i32:16", block=256, warps=2):
    return kernel(
        tile_kernels.log_sum_exp, num_warps=warps, x=f"*{dtype}", y="*fp32", n=size,
        STAGES=stages, BLOCK=block,
    )  # fmt: skip


@pytest.mark.parametrize("n", [16, 256, 272, 1024, 1536])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_every_trip_count_gives_the_same(kernel, names, stages, n):
    x = np.random.default_rng(n).standard_normal(2048).astype(np.float32)
    kern = log_sum_exp(kernel, stages)
    module = kern.check([x, np.zeros(1, np.float32)], [n])
    ops = names(module)
    assert ops.count("mt.async_copy") == stages and "mt.barrier" not in ops
    assert ops.count("mt.load") == 0
    (result,) = kern.run(module, [x, np.zeros(1, np.float32)], [n])[1]
    assert abs(result - np.log(np.exp(x[:n].astype(np.float64)).sum())) < 1e-5


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"stages": 1}, "one stage"),
        ({"size": "i32"}, "a mask that may differ within 16 bytes"),
        ({"stages": None}, "num_stages of the launch is not the loop's"),
        ({"block": 32768, "warps": 16}, "128 KB an iteration: no room for two"),
        ({"block": 128}, "8 bytes a thread"),
    ],
)
def test_what_is_left_alone(kernel, names, changed, why):
    assert "mt.async_copy" not in names(log_sum_exp(kernel, **changed).compile()), why


def test_without_the_target_or_the_option(kernel, names):
    assert "mt.async_copy" not in names(log_sum_exp(kernel).compile(pipeline_loads=False))


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_stores_in_the_loop_want_num_stages_on_it(kernel, names, stages):
    """It promises that what is written is not read under another name."""
    kern = kernel(
        tile_kernels.scaled_rows, num_warps=2, x="*fp32", scale="*fp32", y="*fp32", total="*fp32",
        rows="i32",
        n="i32:16", STAGES=None if stages == 1 else stages, BLOCK=256,
    )  # fmt: skip
    x = np.random.default_rng(stages).standard_normal((5, 240)).astype(np.float32)
    arrays = [x, x[:, 3].copy(), np.zeros_like(x), np.zeros(256, np.float32)]
    module = kern.check(arrays, [5, 240])
    assert names(module).count("mt.async_copy") == (0 if stages == 1 else 2 * stages)  # x, scale
    assert names(module).count("mt.load") == (2 if stages == 1 else 0)
    (loop,) = (op for op in walk(kernel_of(module)) if op.name == "scf.for")
    assert len(loop.results) == (1 if stages == 1 else 3)  # the sum, and two slot numbers
    said = any("copied ahead" in text for text in remarks_of(module))
    assert said == (stages > 1)


def test_what_stays_in_the_loop_is_not_copied(kernel, names):
    """A tile that is the same in every iteration, and one whose address was just loaded."""
    kern = kernel(
        tile_kernels.rows_of_a_table, num_warps=2, table="*i32", x="*fp32", w="*fp32", y="*fp32",
        rows="i32", BLOCK=256,
    )  # fmt: skip
    rng = np.random.default_rng(8)
    arrays = [
        rng.integers(0, 6, 9).astype(np.int32), rng.standard_normal((6, 256)).astype(np.float32),
        rng.standard_normal(256).astype(np.float32), np.zeros(256, np.float32),
    ]  # fmt: skip
    module = kern.check(arrays, [9])
    ops = names(module)
    assert ops.count("mt.local_alloc") == 1


def test_scalars_are_copied_by_a_lane_of_every_warp(kernel, names):
    """Those of four bytes or more: an element a warp, of which each thread takes its warp's."""

    def compiled(dtype):
        kern = kernel(
            tile_kernels.scaled_rows, num_warps=2, x="*fp32", scale=f"*{dtype}", y="*fp32",
            total="*fp32", rows="i32", n="i32:16", STAGES=3, BLOCK=256,
        )  # fmt: skip
        return kern.compile()

    (taken,) = (op for op in walk(kernel_of(compiled("fp32"))) if op.name == "mt.unsplat")
    assert tuple(taken.operands[0].type.shape) == (2,)
    left = names(compiled("bf16"))
    assert "mt.unsplat" not in left and left.count("mt.async_copy") == 3
