"""Registers of wgmma: what must lie before wgmma.fence, and when a product reads its operands."""

from __future__ import annotations

import numpy as np
import pytest

from minitriton.runtime.emulator import RegisterRace
from tests.emulator.ptx_harness import kernel, run

TILE = ".shared .align 1024 .b8 tile[10240];"
#: Operands of ones, descriptors of A and B, accumulators of 2.
START = """
    mov.u32 %r10, tile;
    shl.b32 %r5, %r1, 4;
    add.u32 %r5, %r5, %r10;
    mov.b32 %r6, 0x3C003C00;
    st.shared.v4.b32 [%r5], {%r6, %r6, %r6, %r6};
    st.shared.v4.b32 [%r5+2048], {%r6, %r6, %r6, %r6};
    st.shared.v4.b32 [%r5+4096], {%r6, %r6, %r6, %r6};
    st.shared.v4.b32 [%r5+6144], {%r6, %r6, %r6, %r6};
    st.shared.v4.b32 [%r5+8192], {%r6, %r6, %r6, %r6};
    fence.proxy.async.shared::cta;
    bar.sync 0;
    shr.u32 %r7, %r10, 4;
    cvt.u64.u32 %d5, %r7;
    or.b64 %d5, %d5, 0x4000004000010000;
    add.s64 %d6, %d5, 512;
    setp.eq.u32 %p1, 0, 0;
"""
SUMS = "mov.f32 %f1, 2.0; mov.f32 %f2, %f1; mov.f32 %f3, %f1; mov.f32 %f4, %f1;"
LEFT = "mov.b32 %r20, 0x3C003C00; mov.b32 %r21, %r20; mov.b32 %r22, %r20; mov.b32 %r23, %r20;"
SQUARE = "mul.f32 %f1, %f1, %f1;"
FENCE = "wgmma.fence.sync.aligned;"
_WGMMA = "wgmma.mma_async.sync.aligned"
_SUMS = "{%f1, %f2, %f3, %f4}"
PRODUCT = f"{_WGMMA}.m64n8k16.f32.f16.f16 {_SUMS}, %d5, %d6, %p1, 1, 1, 0, 0;"
FROM_REGISTERS = (
    f"{_WGMMA}.m64n8k16.f32.f16.f16 {_SUMS}, {{%r20, %r21, %r22, %r23}}, %d6, %p1, 1, 1, 0;"
)
WIDER = (
    f"{_WGMMA}.m64n16k16.f32.f16.f16 {{%f1, %f2, %f3, %f4, %f5, %f6, %f7, %f8}}, %d5, %d6, %p1,"
    " 1, 1, 0, 0;"
)
DONE = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"


def first_sums(body: str, **options) -> np.ndarray:
    """Of every thread, the first accumulator after the body."""
    out = np.zeros(128, np.float32)
    ptx = kernel(f"{START}{body}\n    st.global.f32 [%d1], %f1;", TILE)
    run(ptx, out, np.zeros(128, np.uint32), block=128, **options)
    return out


def loop(inside: str) -> str:
    """Two turns."""
    return f"""
    mov.u32 %r9, 0;
AGAIN:
    {inside}
    add.u32 %r9, %r9, 1;
    setp.lt.u32 %p2, %r9, 2;
    @%p2 bra AGAIN;"""


RIGHT = {  # body, first sum
    "one product": (SUMS + FENCE + PRODUCT + DONE, 18),
    "products of one shape": (SUMS + FENCE + 2 * PRODUCT + DONE + PRODUCT + DONE, 50),
    "a loop of products": (SUMS + FENCE + loop(PRODUCT + DONE), 34),
    "other registers": (SUMS + FENCE + "mov.f32 %f9, 1.0;" + PRODUCT + DONE, 18),
    "A in registers": (SUMS + LEFT + FENCE + FROM_REGISTERS + DONE, 18),
    "A read meanwhile": (SUMS + LEFT + FENCE + "mov.b32 %r24, %r20;" + FROM_REGISTERS + DONE, 18),
    "fenced in every turn": (SUMS + loop(FENCE + PRODUCT + DONE + SQUARE), 340**2),
    "two shapes": (SUMS + "mov.f32 %f5, 0.0; mov.f32 %f6, 0.0; mov.f32 %f7, 0.0; mov.f32 %f8, 0.0;"
                   + FENCE + PRODUCT + DONE + FENCE + WIDER + DONE, 34),
    "never executed": (SUMS + FENCE + PRODUCT + DONE + "@%p1 bra OVER; add.f32 %f1, %f1, %f1;"
                       + PRODUCT + "\nOVER:", 18),
}  # fmt: skip
WRONG = {  # body, what is named
    "no fence": (PRODUCT + DONE, "no wgmma.fence comes before"),
    "no fence after the start": (SUMS + PRODUCT + DONE, r"\(mov\)"),
    "fence too early": (FENCE + SUMS + PRODUCT + DONE, r"\(mov\)"),
    "read before": (SUMS + FENCE + PRODUCT + DONE + "add.f32 %f9, %f2, %f3;" + PRODUCT, r"\(add\)"),
    "written in a loop": (SUMS + FENCE + loop(PRODUCT + DONE + SQUARE), r"\(mul\)"),
    "on one of two paths": (SUMS + FENCE + "@!%p1 bra SKIP; neg.f32 %f2, %f2;\nSKIP:\n" + PRODUCT
                            + DONE, r"\(neg\)"),
    "A written": (SUMS + FENCE + LEFT + FROM_REGISTERS + DONE, r"\(mov\)"),
    "two shapes": (SUMS + FENCE + PRODUCT + DONE + WIDER + DONE, r"\(wgmma\)"),
}  # fmt: skip


@pytest.mark.parametrize("landing", ["late", "early"])
@pytest.mark.parametrize("case", RIGHT)
def test_fenced_products(case: str, landing: str) -> None:
    body, expected = RIGHT[case]
    assert (first_sums(body, landing=landing) == expected).all()


@pytest.mark.parametrize("case", WRONG)
def test_products_without_a_fence_are_found(case: str) -> None:
    body, named = WRONG[case]
    with pytest.raises(RegisterRace, match=named) as caught:
        first_sums(body)
    assert "wgmma.fence must follow" in str(caught.value) and caught.value.ptx_line
    first_sums(body, checks=("oob",))


@pytest.mark.parametrize("landing", ["late", "early"])
def test_whether_to_add_is_decided_at_issue(landing: str) -> None:
    """The predicate may change while the product runs; the accumulators must not."""
    replace = SUMS + "setp.ne.u32 %p1, 0, 0;" + FENCE + PRODUCT
    body = replace + "setp.eq.u32 %p1, 0, 0;" + DONE
    assert (first_sums(body, landing=landing) == 16).all()
