"""Which loads become TMA copies, and that the programs then still mean the same."""

import json

import numpy as np
import pytest

from minitriton.ir.mlir import ir
from minitriton.ir.tensor_map_specs import read_specs
from minitriton.passes.remarks import remarks_of
from minitriton.passes.traversal import kernel_of, walk
from tests.passes import tma_kernels

RNG = np.random.default_rng(11)
MATRICES = {"a": "*fp16", "b": "*fp16", "c": "*fp32", "M": "i32", "N": "i32", "K": "i32"}
STRIDES = {"sa": "i32:16", "sb": "i32:16"}


def halves(*shape):
    return (RNG.standard_normal(shape) / 4).astype(np.float16)


def ops_named(module, name):
    return [op for op in walk(kernel_of(module)) if op.name == name]


def reasons(module):
    mark = "load not by TMA: "
    return [text.split(mark)[1] for text in remarks_of(module) if mark in text]


def boxes(module):
    return len(read_specs(module.operation))


@pytest.mark.parametrize(("m", "n", "k"), [(64, 64, 128), (80, 48, 144), (16, 112, 16)])
def test_offsets_that_wrap_round(kernel, m, n, k):
    kern = kernel(
        tma_kernels.tutorial, **MATRICES, **STRIDES, MASKED=True, SUMMED=False, target="sm_90a"
    )
    a, b, c = halves(m, k), halves(k, n), np.zeros((m, n), np.float32)
    grid = (-(-m // 64), -(-n // 64), 1)
    module = kern.check([a, b, c], [m, n, k, k, n], grid)
    assert boxes(module) == 2 and len(ops_named(module, "mt.tma_copy")) == 2 * 3
    assert not ops_named(module, "mt.async_copy")


@pytest.mark.parametrize(("masked", "summed"), [(False, False), (True, True)])
def test_wrapped_rows_that_are_seen_stay_wrapped(kernel, masked, summed):
    kern = kernel(
        tma_kernels.tutorial, **MATRICES, **STRIDES, MASKED=masked, SUMMED=summed, target="sm_90a"
    )
    a, b, c = halves(80, 128), halves(128, 64), np.zeros((128, 64), np.float32)
    module = kern.check([a, b, c], [80, 64, 128, 128, 64], (2, 1, 1))
    assert boxes(module) == 1
    assert reasons(module) == ["elements that `%` or `where` moves along dimension 0 may be used"]


def test_a_batch_is_a_third_dimension(kernel):
    kern = kernel(
        tma_kernels.batched, **MATRICES, **STRIDES, za="i32:16", zb="i32:16", target="sm_90a"
    )
    a, b, c = halves(3, 80, 128), halves(3, 128, 64), np.zeros((3, 80, 64), np.float32)
    module = kern.check([a, b, c], [80, 64, 128, 128, 64, 80 * 128, 128 * 64], (2, 1, 3))
    assert [len(spec["box"]) for spec in read_specs(module.operation)] == [3, 3]
    assert [spec["box"] for spec in read_specs(module.operation)] == [[64, 64, 1], [64, 64, 1]]


@pytest.mark.parametrize(("shift", "guarded"), [(0, False), (8, True), (8, False)])
def test_rows_before_the_first(kernel, shift, guarded):
    kern = kernel(
        tma_kernels.shifted, **MATRICES, **STRIDES, SHIFT=shift, GUARDED=guarded, target="sm_90a"
    )
    a, b, c = halves(96, 80), halves(80, 64), np.zeros((96, 64), np.float32)
    scalars = [96, 64, 80, 80, 64]
    if shift and not guarded:  # it reads what lies before the matrix, and still does
        module = kern.compile()
        assert read_specs(module.operation)[0]["offset"] == [[-8, [6]]]
    else:
        module = kern.check([a, b, c], scalars, (2, 1, 1))
        assert read_specs(module.operation)[0]["offset"] == []
    assert boxes(module) == 2


@pytest.mark.parametrize(("masked", "m"), [(True, 96), (True, 192), (False, 128)])
def test_programs_that_count_down(kernel, masked, m):
    """The map begins where the matrix does: before it there may be no memory."""
    kern = kernel(tma_kernels.counting_down, **MATRICES, **STRIDES, MASKED=masked, target="sm_90a")
    a, b, c = halves(m, 128), halves(128, 64), np.zeros((m, 64), np.float32)
    module = kern.check([a, b, c], [m, 64, 128, 128, 64], (-(-m // 64), 1, 1))
    assert boxes(module) >= 2 and all(s["offset"] == [] for s in read_specs(module.operation))


@pytest.mark.parametrize("count", [0, 1, 5])
def test_loops_that_count_down(kernel, count):
    """Likewise: neither the last pair nor the one before the first begins the map."""
    pointers = {"a": "*fp16", "b": "*fp16", "c": "*fp32", "counts": "*i32"}
    kern = kernel(tma_kernels.loop_down, **pointers, sa="i32:16", target="sm_90a")
    a, b, c = halves(6, 80, 64), halves(5, 64, 64), np.zeros((64, 64), np.float32)
    module = kern.check([a, b, c, np.array([count], np.int32)], [80 * 64])
    assert boxes(module) == 2 and all(s["offset"] == [] for s in read_specs(module.operation))


def test_slices_of_k(kernel):
    kern = kernel(tma_kernels.slices, **MATRICES, **STRIDES, slice="i32:16", target="sm_90a")
    a, b, c = halves(64, 272), halves(272, 64), np.zeros((3, 64, 64), np.float32)
    module = kern.check([a, b, c], [64, 64, 272, 272, 64, 128], (1, 1, 3))
    assert boxes(module) == 2


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (0, "its mask bounds dimension 0 twice"),
        (1, "its mask is not a box of coordinates"),
        (2, "its addresses are not an argument plus an affine function"),
        (3, "a coordinate may be negative"),
        (4, "a coordinate may be negative"),
    ],
)
def test_what_no_tensor_map_describes(kernel, kind, reason):
    kern = kernel(
        tma_kernels.odd_masks, **MATRICES, **STRIDES, lengths="*i32", KIND=kind, PROMISE="",
        target="sm_90a",
    )  # fmt: skip
    a, b, c = halves(64, 144), halves(144, 64), np.zeros((64, 64), np.float32)
    lengths = np.array([4], np.int32)
    module = kern.check([a, b, c, lengths], [64, 64, 144, 144, 64])
    assert boxes(module) == 1 and reasons(module) == [reason]


@pytest.mark.parametrize(
    ("promise", "count"),
    [("rows >= 0", 2), ("0 <= rows", 2), ("rows > -1", 2), ("rows > -2", 1), ("rows < 9", 1),
     ("sometimes", 1)],
)  # fmt: skip
def test_promises_about_loaded_numbers(kernel, promise, count):
    """tl.assume: the row that is loaded, where the copies begin, is not negative."""
    kern = kernel(
        tma_kernels.odd_masks, **MATRICES, **STRIDES, lengths="*i32", KIND=3, PROMISE=promise,
        target="sm_90a",
    )  # fmt: skip
    a, b, c = halves(64, 144), halves(144, 64), np.zeros((64, 64), np.float32)
    module = kern.check([a, b, c, np.array([4], np.int32)], [64, 64, 144, 144, 64])
    assert boxes(module) == count


GROUPS = {**MATRICES, **STRIDES, "zb": "i32:16", "firsts": "*i32", "counts": "*i32"}


@pytest.mark.parametrize(
    ("kind", "firsts", "counts"),
    [
        ("masked", [0, 5, 40, 3, -7], [5, 35, 40, 0, -1]),  # nothing is read of an empty group
        ("masked", [72, 0, 79, 90, 1], [8, 64, 1, 0, 64]),
        ("wrapped", [0, 5, 40, 79, 72], [5, 35, 40, 1, 8]),
    ],
)
def test_rows_past_the_end_of_a_group(kernel, kind, firsts, counts):
    """They end at a loaded number, begin at another, and nobody sees more: no promise is needed."""
    kern = kernel(tma_kernels.groups, **GROUPS, KIND=kind, SEEN=False, target="sm_90a")
    a, b, c = halves(80, 80), halves(3, 80, 48), np.zeros((5, 64, 48), np.float32)
    firsts, counts = np.array([*firsts, 2, 0, 1, 1, 2], np.int32), np.array(counts, np.int32)
    module = kern.check([a, b, c, firsts, counts], [48, 80, 80, 48, 80 * 48], (5, 1, 1))
    of_a, of_b = read_specs(module.operation)
    assert (of_a["spans"], of_a["signed"], of_a["sizes"]) == (True, True, [[[1, [6]]], None])
    assert (of_b["spans"], of_b["signed"], len(of_b["sizes"])) == (False, True, 3)
    assert not reasons(module) and not ops_named(module, "mt.async_copy")


@pytest.mark.parametrize(
    ("kind", "seen", "reason"),
    [
        ("masked", True, "a coordinate may be negative"),
        ("wrapped", True, "elements that `%` or `where` moves along dimension 0 may be used"),
        ("both ends", False, "a coordinate may be negative"),
        ("endless", False, "where a dimension ends does not come from arguments alone"),
        ("two strides", False, "where a dimension ends does not come from arguments alone"),
    ],
)
def test_rows_that_no_memory_ends(kernel, kind, seen, reason):
    """Somebody sees them, or their memory cannot be told before the launch."""
    kern = kernel(tma_kernels.groups, **GROUPS, KIND=kind, SEEN=seen, target="sm_90a")
    a, b, c = halves(80, 80), halves(2, 128, 48), np.zeros((2, 64, 48), np.float32)
    arrays = [a, b, c, np.array([0, 12, 1, 0], np.int32), np.array([12, 40], np.int32)]
    module = kern.check(arrays, [48, 64, 80, 48, 128 * 48], (2, 1, 1))
    assert reasons(module) == [reason] and boxes(module) == 1


@pytest.mark.parametrize(
    ("changed", "count"),
    [
        ({}, 2),
        ({"sa": "i32"}, 1),
        ({"a": "*fp32", "b": "*fp32"}, 0),  # no wgmma
        ({"target": "sm_80"}, 0),
        ({"num_stages": 1}, 0),
    ],
)
def test_what_else_decides(kernel, changed, count):
    arguments = {**MATRICES, **STRIDES, "MASKED": True, "SUMMED": False, "target": "sm_90a"}
    module = kernel(tma_kernels.tutorial, **{**arguments, **changed}).compile()
    assert boxes(module) == count


def test_the_option_turns_it_off(kernel):
    arguments = {**MATRICES, **STRIDES, "MASKED": True, "SUMMED": False, "target": "sm_90a"}
    module = kernel(tma_kernels.tutorial, **arguments).compile(tma=False)
    assert not boxes(module) and not ops_named(module, "mt.tma_copy")


NAN = float("nan")


@pytest.mark.parametrize(
    ("fill", "found"),
    [
        (0.0, ["zero", "zero"]),
        (NAN, ["nan", "zero"]),
        (-0.0, ["zero"]),
        (1.0, ["zero"]),
        (float("inf"), ["zero"]),
        ("another NaN", ["zero"]),
        ("-NaN", ["zero"]),
    ],
)
def test_what_is_outside(kernel, fill, found):
    """Zero or NaN, but not a certain NaN; anything else threads must load."""
    kern = kernel(tma_kernels.filled, **MATRICES, **STRIDES, FILL=fill, target="sm_90a")
    a, b, c = halves(48, 128), halves(56, 128), np.zeros((64, 64), np.float32)
    module = kern.check([a, b, c], [48, 56, 128, 128, 128])
    assert [spec["fill"] for spec in read_specs(module.operation)] == found
    left = "load not pipelined: masked elements are neither zero nor NaN"
    assert any(left in text for text in remarks_of(module)) == (len(found) == 1)


@pytest.mark.parametrize(
    ("changed", "count", "reason"),
    [
        ({}, 1, None),
        ({"a": "*bf16", "b": "*bf16"}, 1, None),
        ({"a": "*fp32", "b": "*fp32"}, 1, None),
        ({"a": "*fp8e4nv", "b": "*fp8e4nv"}, 0, "it has no NaN for elements of 8 bits"),
        ({"sa": "i32"}, 0, "the stride of dimension 0 is not a proved multiple of 16 B"),
        ({"target": "sm_80"}, 0, None),
    ],
)
def test_who_fills_with_nan(kernel, changed, count, reason):
    arguments = {**MATRICES, **STRIDES, "FILL": NAN, "target": "sm_90a", **changed}
    module = kernel(tma_kernels.filled, **arguments).compile()
    assert [spec["fill"] for spec in read_specs(module.operation)].count("nan") == count
    assert reasons(module) == ([reason] if reason else [])
    left = "load not pipelined: only TMA fills with NaN"
    assert any(left in text for text in remarks_of(module)) == (count == 0)


def test_specs_are_plain_data(kernel):
    arguments = {**MATRICES, **STRIDES, "MASKED": True, "SUMMED": False, "target": "sm_90a"}
    module = kernel(tma_kernels.tutorial, **arguments).compile()
    text = ir.StringAttr(module.operation.attributes["mt.tensor_maps"]).value
    first, second = json.loads(text)
    assert first == {
        "base": 0, "offset": [], "strides": [[[1, [6]]]], "sizes": [[[1, [5]]], [[1, [3]]]],
        "box": [64, 64], "swizzle": 128, "element_bytes": 2, "element": "f16", "non_negative": [],
        "spans": False, "signed": False, "fill": "zero",
    }  # fmt: skip
    assert (second["base"], second["strides"]) == (1, [[[1, [7]]]])
