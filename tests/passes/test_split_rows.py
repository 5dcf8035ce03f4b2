"""Programs of 12 warps become those of three groups with a third of the rows each, or errors."""

import numpy as np
import pytest

from minitriton.ir.diagnostics import CompileError
from minitriton.ir.dialect import shape_of
from minitriton.ir.warp_roles import GROUPS, ROW_GROUPS
from minitriton.passes.split_rows import run
from minitriton.passes.tile_pass import PassOptions
from minitriton.passes.traversal import int_attribute, kernel_of, ops_of, walk
from tests.passes import ring_kernels, row_kernels
from tests.passes.test_warp_split import MATRICES, halves, named

SPLIT = {"num_warps": 12, "target": "sm_90a"}
BLOCKS = {"BM": 192, "BN": 128, "BK": 64}


def product(kernel, kind="", **changed):
    arguments = {**MATRICES, "d": "*fp32", **BLOCKS, "KIND": kind, **SPLIT, **changed}
    return kernel(row_kernels.product, **arguments)


def data(m, n, k):
    """The arrays of a product, the last one for what else it writes, and its scalars."""
    other = np.zeros(max(m * n, 1), np.float32)
    return [halves(m, k), halves(k, n), np.zeros((m, n), np.float32), other], [m, n, k, k, n]


def shapes(module, name):
    return {tuple(shape_of(op.results[0].type)) for op in named(kernel_of(module), name)}


def test_a_product(kernel):
    """Ranges of rows are a third, from the group's first row on; the others stay."""
    module = product(kernel).compile(upto="split_rows")
    top = module.operation
    assert int_attribute(top, "mt.num_warps") == 4
    assert int_attribute(top, GROUPS) == int_attribute(top, ROW_GROUPS) == 3
    assert shapes(module, "mt.dot") == {(64, 128)}
    assert shapes(module, "mt.load") == {(64, 64), (64, 128)}
    ranges = named(kernel_of(module), "mt.make_range")
    assert {int_attribute(op, "end") for op in ranges} == {64, 128}
    entry = ops_of(kernel_of(module).regions[0].blocks[0])
    assert entry[0].name == "mt.group_id" and entry[2].name == "arith.muli"
    moved = [op for op in ranges if _is_moved(op, entry[2])]
    assert len(moved) == 1 and shape_of(moved[0].results[0].type) == (64,)


def _is_moved(range_, start):
    """Whether all uses of a range are one sum with the splat of `start`."""
    users = [use.owner.operation for use in range_.results[0].uses]
    if [op.name for op in users] != ["arith.addi"]:
        return False
    splat = users[0].operands[1].owner.operation
    return splat.name == "mt.splat" and splat.operands[0].owner.operation == start


@pytest.mark.parametrize("kind", ["", "promises", "joined", "transposed", "rows of sums"])
@pytest.mark.parametrize(("m", "n", "k"), [(192, 128, 64), (250, 80, 200)])
def test_the_groups_together_do_what_the_program_did(kernel, kind, m, n, k):
    """Straight after the pass."""
    arrays, scalars = data(m, n, k)
    kern, grid = product(kernel, kind), (-(-m // 192), 1, 1)
    before = kern.run(kern.build(), arrays, scalars, grid)
    after = kern.run(kern.compile(upto="split_rows"), arrays, scalars, grid)
    assert before[2].any() and bool(kind in ("", "promises", "joined")) != before[3].any()
    for x, y in zip(before, after, strict=True):
        np.testing.assert_array_equal(x, y)


def test_groups_have_rows_of_their_own(kernel, monkeypatch):
    """One group alone leaves the rows of the others as they are."""
    from minitriton.ir import interpret

    arrays, scalars = data(192, 128, 64)
    kern = product(kernel)
    monkeypatch.setitem(interpret.RULES, "mt.group_id", lambda *_: [np.int32(1)])
    (made,) = kern.run(kern.compile(upto="split_rows"), arrays, scalars)[2:3]
    assert made[64:128].any() and not made[:64].any() and not made[128:].any()


def test_promises_are_those_of_a_third(kernel):
    """192 rows in a row, the first a multiple of 192: 64 rows, the first a multiple of 64."""
    module = product(kernel, "promises").compile(upto="split_rows")
    hints = named(kernel_of(module), "mt.hint")
    found = [str(op.attributes[name]) for op in hints for name in ("divisibility", "contiguity")
             if name in op.attributes]  # fmt: skip
    assert found == ["array<i64: 64>", "array<i64: 64>"]


def test_rows_and_columns_of_one_size(kernel):
    """A range for each; what is computed once for both cannot be split."""
    kern = kernel(row_kernels.gram, a="*fp16", c="*fp32", n="i32:16", B=192, BK=64, **SPLIT)
    arrays = [halves(192, 128), np.zeros((192, 192), np.float32)]
    module = kern.check(arrays, [128])
    assert shapes(module, "mt.warpgroup_dot") == {(64, 192)}
    with pytest.raises(CompileError, match="they are also the columns of a product"):
        product(kernel, "one range", BN=192).compile()


def test_several_sizes(kernel):
    """A third may have 64 rows or a multiple of it."""
    module = product(kernel, BM=384).compile(upto="split_rows")
    assert shapes(module, "mt.dot") == {(128, 128)}


@pytest.mark.parametrize("warps", [1, 4, 8, 16])
def test_other_kernels_stay(kernel, warps):
    kern = product(kernel, num_warps=warps)
    assert str(kern.compile(upto="split_rows")) == str(kern.build())


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("sums of columns", "a reduction along them"),
        ("flattened", "a reshape mixes them"),
        ("a row", "what is stored here has not the rows"),
        ("a number", "what is stored here has not the rows"),
        ("a ticket", "what is stored here has not the rows"),
        ("a barrier", "barrier is for the program as a whole"),
        ("a message", "print is for the program as a whole"),
    ],
)
def test_refusals(kernel, kind, reason):
    """With the line of what is in the way, and what to do."""
    with pytest.raises(CompileError) as caught:
        product(kernel, kind).compile()
    text = str(caught.value)
    assert text.startswith("error: num_warps=12 is not possible: ") and reason in text
    assert "row_kernels.py:" in text and "use 4 or 8" in text


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"BM": 128}, "this product has 128 rows, no multiple of 192"),
        ({"BM": 96}, "this product has 96 rows, no multiple of 192"),
        ({"target": "sm_80"}, "sm_80 has no producer warps"),
        ({"target": "sm_120a"}, "sm_120a has no producer warps"),
    ],
)
def test_refusals_of_sizes_and_targets(kernel, changed, reason):
    with pytest.raises(CompileError, match=reason):
        product(kernel, **changed).compile()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"specialize": False}, "switched off"),
        ({"wgmma": False}, "switched off"),
        ({"pipeline_loads": False}, "switched off"),
        ({"tma": False}, "TMA is switched off, or cannot describe"),
        ({"share_registers": False}, "nvJitLink ignores setmaxnreg"),
    ],
)
def test_refusals_of_options(kernel, options, reason):
    with pytest.raises(CompileError, match=reason):
        product(kernel).compile(**options)


def test_no_products_no_loop_no_copies(kernel):
    """What no producer warp copies for is an error, as early as that is known."""
    arguments = {"a": "*fp16", "c": "*fp32", **SPLIT}
    with pytest.raises(CompileError, match="the kernel has no matrix product"):
        kernel(row_kernels.without_products, B=192, **arguments).compile()
    with pytest.raises(CompileError, match="it has no loop with products"):
        kernel(row_kernels.one_product, b="*fp16", B=192, D=64, **arguments).compile()
    with pytest.raises(CompileError, match="its products are not made by whole warpgroups"):
        kernel(row_kernels.by_hand, n="i32:16", B=192, D=64, BK=64, **arguments).compile()
    with pytest.raises(CompileError, match="its products are not made by whole warpgroups"):
        product(kernel, num_stages=1).compile()


def test_a_loop_that_writes_first(kernel):
    """Reasons and remarks of `warp_split` come along."""
    arguments = {**MATRICES, "ends": "*i32", **BLOCKS, **SPLIT, "KIND": "a write before"}
    with pytest.raises(CompileError) as caught:
        kernel(ring_kernels.product, **arguments).compile()
    text = str(caught.value)
    assert "no producer warp copies for this: the kernel writes memory before it" in text
    assert "not warp specialised" in text and "tl.dot(x, y, acc)" in text


def test_too_many_results(kernel):
    with pytest.raises(CompileError, match="too many results"):
        product(kernel, BM=384, BN=192).compile()


def test_nothing_is_left_of_the_whole_rows(kernel):
    """No tile of 192 rows is anywhere, in loops and branches either."""
    kern = kernel(
        ring_kernels.attention, q="*fp16", k="*fp16", v="*fp16", o="*fp32", T="i32", BM=192, BN=96,
        D=64, INSIDE=False, CAUSAL=True, **SPLIT,
    )  # fmt: skip
    module = kern.build()
    run(module, kern.target, PassOptions())
    tiles = [shape_of(v.type) for op in walk(kernel_of(module)) for v in op.results]
    assert not [shape for shape in tiles if shape and 192 in shape]
    assert module.operation.verify()
