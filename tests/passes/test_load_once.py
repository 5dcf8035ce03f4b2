"""Tiles whose neighbours have one address: which are loaded once, and that the values stay."""

import ml_dtypes
import numpy as np
import pytest

import minitriton.language as tl
from minitriton.passes.remarks import remarks_of
from minitriton.passes.traversal import kernel_of, walk


def product(
    a, w, c, start, K, FORM: tl.constexpr, PACK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """c = a b, with a [BM, K] and b of whole numbers, each of PACK rows in a run that of w."""
    m, n, k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    w_ptrs = w + (k[:, None] // PACK) * BN + n[None, :]
    for first in range(0, K, BK):
        x = tl.load(a + m[:, None] * K + (first + k)[None, :])
        if FORM == "carried":
            y = tl.load(w_ptrs)
            w_ptrs += BK // PACK * BN
        elif FORM == "turned":
            at = (first + k)[None, :] // PACK * BN + n[:, None]
            y = tl.trans(tl.load(w + at))
        elif FORM == "masked alike":
            wanted = ((first + k)[:, None] // PACK < K) & (n[None, :] < BN - 1)
            y = tl.load(w + (first + k)[:, None] // PACK * BN + n[None, :], mask=wanted, other=3)
        elif FORM == "masked apart":
            wanted = (first + k)[:, None] < K - 1
            y = tl.load(w + (first + k)[:, None] // PACK * BN + n[None, :], mask=wanted, other=3)
        elif FORM == "wrapped":
            at = (start * BN + n) % (BN + start)
            y = tl.load(w + (first + k)[:, None] // PACK * BN + at[None, :])
        elif FORM == "others differ":
            wanted = ((first + k)[:, None] // PACK < K // PACK - 1) & (n[None, :] < BN - 1)
            others = k[:, None] + n[None, :]
            y = tl.load(w + (first + k)[:, None] // PACK * BN + n[None, :], wanted, others)
        elif FORM == "perhaps negative":
            at = (first + k + start) // PACK
            y = tl.load(w + at[:, None] * BN + n[None, :])
        elif FORM == "rows":
            y = tl.load(w + (first + k)[:, None] // PACK * BN + (n * 0)[None, :])
        else:
            y = tl.load(w + (first + k)[:, None] // PACK * BN + n[None, :])
        if FORM == "as it comes":
            acc = tl.dot(x, y, acc)
        elif FORM == "reduced":
            acc = tl.dot(x, x.T.to(tl.bfloat16), acc) + tl.sum(y.to(tl.float32), 0)[None, :]
        else:
            acc = tl.dot(x, (y & 7).to(tl.bfloat16), acc)
    tl.store(c + m[:, None] * BN + n[None, :], acc)


def made(kernel, form, pack=8, blocks=(64, 64, 64), word="i32", **options):
    bm, bn, bk = blocks
    given = {"num_stages": 3, "target": "sm_90a", "num_warps": 4} | options
    return kernel(
        product, a="*bf16", w=f"*{word}", c="*fp32", start="i32", K="i32:16", FORM=form, PACK=pack,
        BM=bm, BN=bn, BK=bk, **given,
    )  # fmt: skip


def loads(module):
    return {
        tuple(op.results[0].type.shape) for op in walk(kernel_of(module)) if op.name == "mt.load"
    }


@pytest.mark.parametrize(
    ("form", "pack", "shape"),
    [
        ("plain", 8, (8, 64)), ("plain", 2, (32, 64)), ("plain", 64, (1, 64)),
        ("plain", 128, (1, 64)),
        ("carried", 8, (8, 64)), ("carried", 4, (16, 64)), ("turned", 8, (64, 8)),
        ("masked alike", 8, (8, 64)), ("wrapped", 8, (8, 64)), ("rows", 4, (16, 1)),
        ("rows", 64, (1, 1)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_what_is_loaded(kernel, form, pack, shape, target):
    module = made(kernel, form, pack, target=target).compile(upto="load_once")
    assert loads(module) == {(64, 64), shape}
    text = f"load of {shape[0]}x{shape[1]} elements: others are equal to these"
    assert any(text in remark for remark in remarks_of(module))


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("masked apart", {}),
        ("others differ", {}),
        ("perhaps negative", {}),
        ("reduced", {}),
        ("as it comes", {"word": "bf16"}),
        ("plain", {"pack": 1}),
        ("plain", {"pack": 3}),
        ("plain", {"num_stages": 1}),
        ("plain", {"blocks": (64, 64, 48), "pack": 3}),
    ],
)
def test_what_stays(kernel, form, options):
    module = made(kernel, form, **options).compile(upto="load_once")
    bm, bn, bk = options.get("blocks", (64, 64, 64))
    assert loads(module) == {(bm, bk), (bk, bn)} and not remarks_of(module)


@pytest.mark.parametrize("k", [0, 64, 192])
@pytest.mark.parametrize(
    ("form", "pack"),
    [("plain", 8), ("plain", 64), ("plain", 128), ("carried", 8), ("masked alike", 4),
     ("wrapped", 8), ("masked apart", 4), ("others differ", 4), ("perhaps negative", 8),
     ("rows", 8)],
)  # fmt: skip
def test_the_meaning_stays(kernel, form, pack, k):
    rng = np.random.default_rng(k)
    a = rng.integers(0, 9, 64 * 192).astype(ml_dtypes.bfloat16)
    w = rng.integers(0, 1 << 30, 64 * 192).astype(np.int32)
    made(kernel, form, pack).check([a, w, np.zeros((64, 64), np.float32)], [4, k])
