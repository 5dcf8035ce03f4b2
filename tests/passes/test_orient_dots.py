"""Dots whose B wgmma could not read: which are turned, which are marked, which stay."""

import ml_dtypes
import numpy as np
import pytest

import minitriton.language as tl
from minitriton.ir.encoding import mem_layout
from minitriton.ir.matrix_descriptor import matrix_descriptor
from minitriton.ir.tensor_map_specs import read_specs
from minitriton.passes.remarks import remarks_of
from minitriton.passes.shared_usage import buffer_of
from minitriton.passes.traversal import defining_op, int_array, kernel_of, walk
from minitriton.passes.warpgroup_dots import ADJACENT_ROWS, ORIENTED


def product(
    a, b, c, K, ORDERS: tl.constexpr, FORM: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """c = a b with a [BM, K] (or stored as [K, BM]) and b [K, BN] (or [BN, K]), whole blocks."""
    m, n, k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    whole: tl.constexpr = tl.int32 if a.dtype.element_ty.is_int() else tl.float32
    acc = tl.zeros((BM, BN), dtype=whole)
    before = tl.load(b + k[:, None] * BN + n[None, :])
    for start in range(0, K, BK):
        if ORDERS == "km, kn" or ORDERS == "km, nk":
            x = tl.load(a + (start + k)[:, None] * BM + m[None, :]).T
        else:
            x = tl.load(a + m[:, None] * K + (start + k)[None, :])
        if ORDERS == "mk, kn" or ORDERS == "km, kn":
            y = tl.load(b + (start + k)[:, None] * BN + n[None, :])
        else:
            y = tl.load(b + n[:, None] * K + (start + k)[None, :]).T
        if FORM == "sum":
            acc = tl.dot(x, y, acc, input_precision=PRECISION)
        elif FORM == "scaled":
            acc += tl.dot(x, y, input_precision=PRECISION) * 2
        elif FORM == "computed left":
            acc = tl.dot(x + x, y, acc, input_precision=PRECISION)
        elif FORM == "computed right":
            acc = tl.dot(x, y + y, acc, input_precision=PRECISION)
        elif FORM == "computed both":
            acc = tl.dot(x + x, y + y, acc, input_precision=PRECISION)
        elif FORM == "constant right":
            acc = tl.dot(x, tl.full((BK, BN), 1, a.dtype.element_ty), acc)
        elif FORM == "product right":
            z = tl.dot(y, tl.trans(y)).to(a.dtype.element_ty)
            acc = tl.dot(x, z, acc, input_precision=PRECISION)
        elif FORM == "made before":
            acc = tl.dot(x, before + before, acc, input_precision=PRECISION)
        else:
            acc = tl.dot(x, y, acc, input_precision=PRECISION) + tl.sum(x.to(whole), 1)[:, None]
    tl.store(c + m[:, None] * BN + n[None, :], acc)


def made(kernel, orders, dtype="fp32", form="sum", precision="tf32", blocks=None, **options):
    bm, bn, bk = blocks or (128, 64, 32 if dtype == "fp32" else 64)
    whole = "*int32" if "int" in dtype else "*fp32"
    given = {"num_stages": 3, "target": "sm_90a", "num_warps": 4} | options
    return kernel(
        product, a=f"*{dtype}", b=f"*{dtype}", c=whole,
        K="i32:16", ORDERS=orders, FORM=form, PRECISION=precision, BM=bm, BN=bn, BK=bk, **given,
    )  # fmt: skip


def ops_named(module, name):
    return [op for op in walk(kernel_of(module)) if op.name == name]


def dot_of(module):
    """(shape of the result, whether marked, whether rows are adjacent) of the only dot."""
    (dot,) = ops_named(module, "mt.dot")
    marks = [name in dot.attributes for name in (ORIENTED, ADJACENT_ROWS)]
    return (tuple(dot.results[0].type.shape), *marks)


ORDERS = {  # the dot's shape, whether warpgroups can make it, whether A is stored along its rows
    "mk, nk": ((128, 64), True, False),
    "mk, kn": ((64, 128), True, True),
    "km, nk": ((128, 64), True, True),
    "km, kn": ((128, 64), False, False),
}


@pytest.mark.parametrize("dtype", ["fp32", "int8", "uint8"])
@pytest.mark.parametrize("orders", ORDERS)
def test_what_each_memory_order_becomes(kernel, dtype, orders):
    module = made(kernel, orders, dtype).compile(upto="orient_dots")
    assert dot_of(module) == ORDERS[orders]
    refused = [text for text in remarks_of(module) if "dot not by wgmma" in text]
    assert len(refused) == (orders == "km, kn")
    assert all("neither operand is stored along the depth" in text for text in refused)


def test_a_sum_is_carried_as_its_transpose(kernel, names):
    module = made(kernel, "mk, kn").compile(upto="orient_dots")
    (loop,) = ops_named(module, "scf.for")
    (dot,) = ops_named(module, "mt.dot")
    assert [str(result.type) for result in loop.results] == ["tensor<64x128xf32>"]
    assert dot.operands[2] == loop.regions[0].blocks[0].arguments[1]
    turned = [defining_op(dot.operands[index]) for index in (0, 1)]
    assert [op.name for op in turned] == ["mt.trans"] * 2
    (after,) = [op for op in ops_named(module, "mt.trans") if op.parent.operation != loop]
    assert after.operands[0] == loop.results[0]


def test_what_was_transposed_is_not_twice(kernel):
    module = made(kernel, "mk, nk").compile(upto="orient_dots")
    assert len(ops_named(module, "mt.trans")) == 1
    module = made(kernel, "mk, kn", form="scaled").compile(upto="orient_dots")
    (dot,) = ops_named(module, "mt.dot")  # its accumulator is zero, and is made in that shape
    assert defining_op(dot.operands[2]).name == "arith.constant"
    assert len(ops_named(module, "mt.trans")) == 3


@pytest.mark.parametrize("form", ["sum", "scaled", "computed left", "also reduced"])
@pytest.mark.parametrize("dtype", ["fp32", "int8", "uint8"])
@pytest.mark.parametrize("orders", ORDERS)
@pytest.mark.parametrize("k", [0, 64, 192])
def test_the_meaning_stays(kernel, orders, dtype, form, k):
    rng = np.random.default_rng(k)
    kind = {"fp32": np.float32, "int8": np.int8, "uint8": np.uint8}[dtype]
    a, b = (rng.integers(0, 100, n).astype(kind) for n in (64 * 192, 64 * 192))
    c = np.zeros((64, 64), np.float32 if dtype == "fp32" else np.int32)
    made(kernel, orders, dtype, form, blocks=(64, 64, 64)).check([a, b, c], [k])


@pytest.mark.parametrize(
    ("options", "arguments", "remark"),
    [
        ({"target": "sm_80"}, {}, None),
        ({"num_stages": 1}, {}, None),
        ({"num_warps": 2}, {}, None),
        ({"precision": "ieee"}, {}, None),
        ({"precision": "tf32x3"}, {}, None),
        ({"blocks": (128, 32, 32)}, {}, None),  # too few rows of the transpose
        ({}, {"wgmma": False}, None),
        ({}, {"tma": False}, "threads would copy fp32 without rounding it"),
        ({"form": "also reduced"}, {}, "an operand has other uses, and would be rounded for them"),
        ({"form": "computed left"}, {}, "its left operand is computed"),
    ],
)
def test_what_stays(kernel, options, arguments, remark):
    module = made(kernel, "mk, kn", **options).compile(upto="orient_dots", **arguments)
    bm, bn, _ = options.get("blocks", (128, 64, 32))
    assert dot_of(module) == ((bm, bn), False, False)
    assert (remark is None) == (not remarks_of(module))
    assert remark is None or remark in remarks_of(module)[0]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("orders", ORDERS)
def test_a_right_operand_in_registers_becomes_the_left(kernel, orders, dtype):
    kern = made(kernel, orders, dtype, "computed right")
    module = kern.compile(upto="orient_dots")
    assert dot_of(module) == ((64, 128), False, False)
    assert any("only its left operand can be in registers" in text for text in remarks_of(module))
    (dot,) = ops_named(kern.compile(), "mt.warpgroup_dot")
    assert tuple(dot.results[0].type.shape) == (64, 128)


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("computed left", {}),
        ("computed both", {}),
        ("constant right", {}),
        ("made before", {}),  # all of it before the loop: no copies are ahead of it
        ("product right", {"blocks": (64, 64, 64)}),
        ("scaled", {}),
        ("computed right", {"blocks": (128, 32, 64)}),
        ("computed right", {"num_stages": 1}),
        ("computed right", {"num_warps": 2}),
        ("computed right", {"target": "sm_80"}),
    ],
)
def test_operands_that_are_right_as_they_are(kernel, form, options):
    module = made(kernel, "mk, kn", "bf16", form, **options).compile(upto="orient_dots")
    bm, bn, _ = options.get("blocks", (128, 64, 64))
    shapes = {tuple(dot.results[0].type.shape) for dot in ops_named(module, "mt.dot")}
    assert shapes == {(bm, bn)} and not remarks_of(module)


@pytest.mark.parametrize("orders", ORDERS)
@pytest.mark.parametrize("k", [0, 192])
def test_sums_of_a_turned_dot(kernel, orders, k):
    rng = np.random.default_rng(k)
    a, b = (rng.integers(0, 9, 64 * 192).astype(ml_dtypes.bfloat16) for _ in range(2))
    c = np.zeros((64, 64), np.float32)
    made(kernel, orders, "bf16", "computed right", blocks=(64, 64, 64)).check([a, b, c], [k])


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
@pytest.mark.parametrize("orders", ["mk, nk", "mk, kn", "km, nk"])
def test_where_operands_are_read(kernel, dtype, orders):
    """B lies where wgmma reads it, A there too or in registers, by loads without conflicts."""
    module = made(kernel, orders, dtype, blocks=(128, 128, 32)).compile()
    (dot,) = ops_named(module, "mt.warpgroup_dot")
    size = 4 if dtype == "fp32" else 1
    assert matrix_descriptor(mem_layout(dot.operands[1].type), 1, size) is not None
    specs = {spec["element"]: spec for spec in read_specs(module.operation)[:2]}
    assert list(specs) == ["tf32" if dtype == "fp32" else "i8"]
    assert not ops_named(module, "mt.local_load") and "mt.in_flight" in dot.attributes
    slot = mem_layout(dot.operands[0].type)
    assert (matrix_descriptor(slot, 0, size) is None) == (ADJACENT_ROWS in dot.attributes)
    assert (ADJACENT_ROWS in dot.attributes) == (orders != "mk, nk")
    for operand in list(dot.operands)[:2]:
        assert "mt.alignment" in buffer_of(operand).attributes


@pytest.mark.parametrize(("orders", "bm", "bn"), [("mk, kn", 128, 192), ("km, nk", 192, 128)])
def test_rows_beyond_a_power_of_two_are_adjacent_too(kernel, orders, bm, bn):
    kern = made(kernel, orders, blocks=(bm, bn, 32))
    (dot,) = ops_named(kern.compile(), "mt.warpgroup_dot")
    assert ADJACENT_ROWS in dot.attributes and tuple(dot.results[0].type.shape) == (192, 128)
    rng = np.random.default_rng(7)
    a, b = (rng.integers(0, 9, n * 64).astype(np.float32) for n in (bm, bn))
    kern.check([a, b, np.zeros((bm, bn), np.float32)], [64])


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("specialize", [False, True])
def test_products_of_loaded_rows_end_those_before(kernel, stages, specialize):
    """Nothing else waits for them in the loop; their slots are given back an iteration later."""
    kern = made(kernel, "mk, kn", blocks=(64, 128, 32), num_warps=8, num_stages=stages)
    module = kern.compile(force_specialize=specialize, specialize=specialize)
    loop = [op for op in ops_named(module, "scf.for") if "mt.warpgroup_dot" in str(op)][-1]
    body = [op.name for op in walk(loop)]
    assert "mt.warpgroup_wait" not in body and "mt.warpgroup_result" not in body
    after = body[body.index("mt.warpgroup_dot") + 1 :]
    assert after.index("mt.mbarrier_arrive" if specialize else "mt.barrier") < 12


def test_fp32_that_threads_copy_stays_on_mma_sync(kernel):
    """Their warps share the tile as they do for mma.sync."""
    module = made(kernel, "mk, nk", blocks=(128, 128, 32)).compile(tma=False)
    (dot,) = ops_named(module, "mt.dot")
    assert int_array(dot, "mt.warps") == [2, 2] and not ops_named(module, "mt.warpgroup_dot")
