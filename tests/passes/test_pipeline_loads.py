"""Loops over loads and dots are multi-buffered where that is proved right; results are equal."""

import numpy as np
import pytest

import minitriton.language as tl
from minitriton.passes.remarks import remarks_of
from minitriton.passes.traversal import int_attribute, kernel_of, walk
from tests.passes import tile_kernels


def matmul(kernel, dtype="fp16", stages=3, blocks=(32, 32, 32), target="sm_80"):
    bm, bn, bk = blocks
    return kernel(
        tile_kernels.matmul, num_stages=stages, target=target, a=f"*{dtype}", b=f"*{dtype}",
        c="*fp32", M="i32", N="i32:16", K="i32:16", sa="i32:16", sb="i32:16", sc="i32:16",
        BM=bm, BN=bn, BK=bk,
    )  # fmt: skip


def operands(m, n, k, pad=64, dtype=np.float16):
    rng = np.random.default_rng(m * n + k)
    a = rng.standard_normal((m, k + pad)).astype(dtype)
    b = rng.standard_normal((k + pad, n)).astype(dtype)
    return [a, b, np.zeros((m, n), np.float32)]


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("k", [0, 16, 32, 48, 64, 144])
def test_every_trip_count_gives_the_same(kernel, names, stages, k):
    arrays = operands(32, 32, k)
    kern = matmul(kernel, stages=stages)
    module = kern.check(arrays, [32, 32, k, k + 64, 32, 32])
    ops = names(module)
    assert ops.count("mt.async_copy") == 2 * stages
    assert ops.count("mt.async_commit") == stages
    assert "mt.load" not in ops
    (result,) = kern.run(module, arrays, [32, 32, k, k + 64, 32, 32])[2:]
    expected = arrays[0][:, :k].astype(np.float32) @ arrays[1][:k].astype(np.float32)
    np.testing.assert_allclose(result, expected, atol=1e-3)


def test_one_barrier_per_iteration_and_one_wait(kernel):
    module = matmul(kernel).compile()
    loop = next(op for op in walk(kernel_of(module)) if op.name == "scf.for")
    ops = list(walk(loop))
    assert [op.name for op in ops if op.name in ("mt.barrier", "mt.async_wait")] == [
        "mt.async_wait", "mt.barrier",
    ]  # fmt: skip
    assert int_attribute(next(o for o in ops if o.name == "mt.async_wait"), "pending") == 1
    assert len(loop.results) == 5  # accumulator, two pointers ahead, two slot numbers


def test_one_stage_or_the_option_turns_it_off(kernel, names):
    arrays = operands(32, 32, 80)
    for module in (
        matmul(kernel, stages=1).check(arrays, [32, 32, 80, 144, 32, 32]),
        matmul(kernel).check(arrays, [32, 32, 80, 144, 32, 32], pipeline_loads=False),
    ):
        assert "mt.async_copy" not in names(module)


def test_stages_shrink_to_the_shared_memory(kernel):
    module = matmul(kernel, stages=6, blocks=(128, 128, 64), target="sm_86").compile()
    assert int_attribute(module.operation, "mt.shared_bytes") <= 101_376
    assert any("num_stages 6 reduced to 3" in text for text in remarks_of(module))


def test_attention_keeps_keys_and_values_in_flight(kernel, names):
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((n, 32)).astype(np.float16) for n in (64, 96, 96))
    kern = kernel(
        tile_kernels.attention, q="*fp16", k="*fp16", v="*fp16", o="*fp32", n="i32",
        BM=64, BN=32, D=32,
    )  # fmt: skip
    out = np.zeros((64, 32), np.float32)
    module = kern.check([q, k, v, out], [96])
    ops = names(module)
    assert ops.count("mt.async_copy") == 6 and "mt.mem_trans" in ops
    loop = next(op for op in walk(kernel_of(module)) if op.name == "scf.for")
    inside = [op.name for op in walk(loop)]
    assert inside.count("mt.convert_layout") <= 1  # the softmax tile feeds the next dot as it is
    result = kern.run(module, [q, k, v, out], [96])[3]
    score = (q.astype(np.float32) @ k.astype(np.float32).T) * np.log(2)
    weights = np.exp(score - score.max(1, keepdims=True))
    expected = (weights @ v.astype(np.float32)) / weights.sum(1, keepdims=True)
    np.testing.assert_allclose(result, expected, atol=5e-3)


def test_a_loop_that_stores_is_left_alone(kernel, names):
    kern = kernel(tile_kernels.in_place, a="*fp16", n="i32", B=32)
    tile = (np.random.default_rng(2).standard_normal((32, 32)) / 8).astype(np.float16)
    module = kern.check([tile], [3])
    assert "mt.async_copy" not in names(module)
    assert any("may write memory" in text for text in remarks_of(module))


@pytest.mark.parametrize("elsewhere", [1, 0])
def test_a_promise_on_the_loop_lets_it_store_elsewhere(kernel, names, elsewhere):
    """Pipelined only where the loop itself names num_stages and stores through another argument."""
    kern = kernel(
        tile_kernels.stores_each_step, a="*fp16", c="*fp16", n="i32", B=32, INTO_C=elsewhere
    )
    rng = np.random.default_rng(5)
    a = (rng.standard_normal((4, 32, 32)) / 8).astype(np.float16)
    module = kern.check([a, np.zeros_like(a)], [3])
    assert ("mt.async_copy" in names(module)) == bool(elsewhere)
    if elsewhere:
        result = kern.run(module, [a, np.zeros_like(a)], [3])[1]
        wide = a.astype(np.float32)
        np.testing.assert_allclose(result[:3], wide[:3] @ wide[:3], atol=1e-3)


def through_table(kernel, tile, **arguments):
    """The kernel `tile` on a table of three pages, two tiles per page, and what it gives."""
    rng = np.random.default_rng(3)
    table = np.array([2, 0, 1], np.int32)
    a, b = (rng.standard_normal((3, 32, 32)).astype(np.float16) for _ in range(2))
    kern = kernel(tile, table="*i32", a="*fp16", b="*fp16", c="*fp32", n="i32", B=32, **arguments)
    tensors = [table, a, b, np.zeros((32, 32), np.float32)]
    return kern, kern.check(tensors, [3]), tensors


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_an_address_behind_a_loaded_scalar_is_computed_ahead(kernel, names, stages):
    kern, module, (table, a, b, c) = through_table(kernel, tile_kernels.indirect, num_stages=stages)
    assert names(module).count("mt.async_copy") == 2 * stages
    assert names(module).count("mt.load") == stages  # of the table, masked past the last page
    assert all(len(op.operands) == 2 for op in walk(kernel_of(module)) if op.name == "mt.load")
    (result,) = kern.run(module, [table, a, b, c], [3])[3:]
    expected = sum(a[table[i]].astype(np.float32) @ b[i].astype(np.float32) for i in range(3))
    np.testing.assert_allclose(result, expected, atol=1e-2)


def test_an_address_behind_a_loaded_tile_is_not_computed_ahead(kernel, names):
    _, module, _ = through_table(kernel, tile_kernels.gathered)
    assert names(module).count("mt.async_copy") == 3  # b only
    assert any("address or mask" in text for text in remarks_of(module))


def test_a_table_that_the_loop_writes_is_not_read_ahead(kernel, names):
    table = np.array([2, 0, 0, 0], np.int32)
    a, b = (np.random.default_rng(4).standard_normal((3, 32, 32)).astype(np.float16) for _ in "ab")
    kern = kernel(
        tile_kernels.table_of_pages_written, table="*i32", a="*fp16", b="*fp16", c="*fp32", n="i32",
        B=32,
    )  # fmt: skip
    arrays = [table, a, b, np.zeros((32, 32), np.float32)]
    module = kern.check(arrays, [3])
    assert names(module).count("mt.async_copy") == 3  # b only
    expected = sum(a[i - 1].astype(np.float32) @ b[i].astype(np.float32) for i in range(3))
    np.testing.assert_allclose(kern.run(module, arrays, [3])[3], expected, atol=1e-2)


def test_bytes_are_copied_ahead_although_arithmetic_follows(kernel, names):
    rng = np.random.default_rng(5)
    a = rng.integers(-9, 9, (3, 32, 32)).astype(np.int8)
    b = rng.standard_normal((3, 32, 32)).astype(np.float16)
    kern = kernel(tile_kernels.scaled_bytes, a="*i8", b="*fp16", c="*fp32", n="i32", B=32)
    arrays = [a, b, np.zeros((32, 32), np.float32)]
    module = kern.check(arrays, [3])
    assert names(module).count("mt.async_copy") == 6
    expected = sum(0.5 * a[i].astype(np.float32) @ b[i].astype(np.float32) for i in range(3))
    np.testing.assert_allclose(kern.run(module, arrays, [3])[2], expected, atol=5e-2)


def test_a_tile_that_stays_the_same_is_copied_once(kernel, names):
    kern, module, (table, a, b, c) = through_table(kernel, tile_kernels.fixed_operand)
    assert names(module).count("mt.async_copy") == 1 + 3
    (result,) = kern.run(module, [table, a, b, c], [3])[3:]
    expected = a[0].astype(np.float32) @ b.astype(np.float32).sum(0)
    np.testing.assert_allclose(result, expected, atol=1e-2)


def test_narrow_rows_are_not_copied_asynchronously(kernel, names):
    kern = kernel(
        tile_kernels.matmul, a="*fp16", b="*fp16", c="*fp32", M="i32", N="i32:16", K="i32:16",
        sa="i32", sb="i32:16", sc="i32", BM=32, BN=32, BK=32,
    )  # fmt: skip
    arrays = operands(32, 32, 48, pad=33)
    module = kern.check(arrays, [32, 32, 48, 81, 32, 32])
    assert names(module).count("mt.async_copy") == 3
    assert any("contiguous bytes" in text for text in remarks_of(module))


def bytes_with_a_float(a, b, c, K, B: tl.constexpr):
    """What is masked off is 0.0, as bytes."""
    i = tl.arange(0, B)
    acc = tl.zeros((B, B), tl.int32)
    for k in range(0, K, B):
        x = tl.load(a + i[:, None] * 128 + (k + i)[None, :], mask=(k + i)[None, :] < K, other=0.0)
        y = tl.load(b + i[:, None] * 128 + (k + i)[None, :], mask=(k + i)[None, :] < K, other=-0.3)
        acc = tl.dot(x, y.T, acc)
    tl.store(c + i[:, None] * B + i[None, :], acc)


def test_a_zero_that_was_a_float(kernel, names):
    kern = kernel(bytes_with_a_float, a="*int8", b="*int8", c="*int32", K="i32:16", B=32)
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-128, 128, (32, 128)).astype(np.int8) for _ in "ab")
    module = kern.check([a, b, np.zeros((32, 32), np.int32)], [80])
    assert "mt.load" not in names(module) and "mt.async_copy" in names(module)
