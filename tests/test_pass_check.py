"""MINITRITON_CHECK_PASSES: a wrong pass is named, a right one passes, arrays stay untouched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.compiler import Stages, standard_stages
from minitriton.ir.diagnostics import InternalError


@pytest.fixture(autouse=True)
def checking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINITRITON_CHECK_PASSES", "1")
    monkeypatch.setenv("MINITRITON_CACHE", "0")


def row_kernel(x_ptr, y_ptr, out_ptr, n, scale, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask, other=0)
    total = tl.sum(x - tl.load(y_ptr + offsets, mask=mask, other=0), axis=0)
    tl.store(out_ptr + offsets, (x - total * scale).to(out_ptr.dtype.element_ty), mask=mask)


def matmul_kernel(a_ptr, b_ptr, c_ptr, K, N: tl.constexpr):
    i = tl.arange(0, N)
    acc = tl.zeros((N, N), tl.float32)
    for k in range(0, K, N):
        a = tl.load(a_ptr + i[:, None] * K + (k + i)[None, :])
        acc += tl.dot(a, tl.load(b_ptr + (k + i)[:, None] * N + i[None, :]))
    tl.store(c_ptr + i[:, None] * N + i[None, :], acc)


def text_kernel(x_ptr, out_ptr, n, PURE: tl.constexpr, BLOCK: tl.constexpr):
    """Four bytes at a time through inline PTX, and a tied operand."""
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    y, _ = tl.inline_asm_elementwise(
        "{ .reg .b32 t; xor.b32 t, $3, 0x04040404; not.b32 $0, t; mov.b32 $1, t; mov.b32 $2, t; }",
        "=&r,=r,=r,r",
        [x],
        (tl.int8, tl.float16),
        is_pure=PURE,
        pack=4,
    )
    wide = x.to(tl.int64)
    w = tl.inline_asm_elementwise("{ .reg .s64 t; cvt.s64.s32 t, $2; add.s64 $0, $0, t; }",
                                  "=l,0,r", [wide, n], tl.int64, PURE, 1)  # fmt: skip
    tl.store(out_ptr + i, y.to(tl.int64) + w)


class Mistake:
    """A pass that makes an op of each pair `wrong` out of every op of kind `right`."""

    name = "mistake"

    def __init__(self, change: Callable[[Any], None]) -> None:
        self.change = change
        self.options = standard_options()

    def run(self, module: Any) -> None:
        def visit(op: Any) -> Any:
            self.change(op)
            from minitriton.ir.mlir import ir

            return ir.WalkResult.ADVANCE

        module.operation.walk(visit)


def standard_options() -> Any:
    from minitriton.passes.tile_pass import PassOptions

    return PassOptions()


def with_mistake(change: Callable[[Any], None], after: str) -> Stages:
    """The standard stages with a mistaken pass put in after the one called `after`."""
    standard = standard_stages()

    def passes(target: Any, spec: Any) -> Sequence[Any]:
        steps = list(standard.passes(target, spec))
        place = [step.name for step in steps].index(after) + 1
        return [*steps[:place], Mistake(change), *steps[place:]]

    return dataclasses.replace(standard, passes=passes)


def swap_subtraction(op: Any) -> None:
    if op.name == "arith.subf":
        a, b = op.operands
        op.operands[0], op.operands[1] = b, a


def shorten_loops(op: Any) -> None:
    if op.name == "scf.for":
        op.operands[1] = op.operands[0]


def launch_rows(stages: Stages | None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    kernel = triton.jit(row_kernel, stages=stages) if stages else triton.jit(row_kernel)
    x, y = torch.randn(100).to(dtype), torch.randn(100).to(dtype)
    out = torch.full((100,), 9.0).to(dtype)
    kernel[(1,)](x, y, out, 100, 0.5, BLOCK=128)
    expected = x.double() - (x.double() - y.double()).sum() * 0.5
    assert (out.double() - expected).abs().max() < expected.abs().max() * 0.1
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_the_standard_passes_change_nothing(dtype: torch.dtype) -> None:
    launch_rows(None, dtype)


@pytest.mark.parametrize("after", ["simplify", "assign_layouts", "insert_barriers"])
def test_a_wrong_pass_is_named(after: str) -> None:
    with pytest.raises(
        InternalError, match="the pass changed what 'row_kernel' writes to 'out_ptr'"
    ) as e:
        launch_rows(with_mistake(swap_subtraction, after))
    assert e.value.stage == "mistake"


def test_a_wrong_pass_goes_unseen_without_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINITRITON_CHECK_PASSES", "0")
    with pytest.raises(AssertionError):
        launch_rows(with_mistake(swap_subtraction, "simplify"))


@pytest.mark.parametrize("stages", [1, 3])
def test_pipelined_loops(stages: int) -> None:
    def run(**options: Any) -> np.ndarray:
        kernel = triton.jit(matmul_kernel, **options)
        a, b = (
            np.random.default_rng(1).standard_normal(s).astype(np.float16)
            for s in ((16, 64), (64, 16))
        )
        c = np.full((16, 16), np.nan, np.float32)
        compiled = kernel[(1,)](a, b, c, 64, N=16, num_stages=stages)
        assert compiled.report.lane_instructions > 0
        np.testing.assert_allclose(c, a.astype(float) @ b.astype(float), rtol=1e-3, atol=1e-3)
        return c

    run()
    with pytest.raises(InternalError, match="'c_ptr'") as error:
        run(stages=with_mistake(shorten_loops, "pipeline_loads"))
    assert error.value.stage == "mistake"


def integer_kernel(x_ptr, out_ptr, seed, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i) ^ (seed - i))


def change_one_bit(op: Any) -> None:
    if op.name == "mt.make_range":
        from minitriton.ir.mlir import ir

        i32 = ir.IntegerType.get_signless(32)
        op.attributes["start"] = ir.IntegerAttr.get(i32, 1)
        op.attributes["end"] = ir.IntegerAttr.get(i32, 33)


@pytest.mark.parametrize("seed", [5, 2**32 - 3])
def test_integers_must_agree_exactly(seed: int) -> None:
    x, out = np.arange(40, dtype=np.int32), np.zeros(40, np.int32)
    triton.jit(integer_kernel)[(1,)](x, out, seed, N=32)
    expected = (np.arange(32) ^ (seed - np.arange(32))).astype(np.int64) & 0xFFFFFFFF
    assert (out[:32].view(np.uint32) == expected).all()
    kernel = triton.jit(integer_kernel, stages=with_mistake(change_one_bit, "simplify"))
    with pytest.raises(InternalError, match="'out_ptr'"):
        kernel[(1,)](x, out, seed, N=32)


def test_a_mistaken_pipeline_stays_out_of_the_disk_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("MINITRITON_CACHE", "1")
    monkeypatch.setenv("MINITRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("MINITRITON_CHECK_PASSES", "0")
    with pytest.raises(AssertionError):
        launch_rows(with_mistake(swap_subtraction, "simplify"))
    launch_rows(None)


@pytest.mark.parametrize("pure", [True, False])
def test_inline_ptx(pure: bool) -> None:
    """It is run in the emulator, unless it has effects: then the kernel is left out."""
    kernel = triton.jit(text_kernel)
    x = torch.randint(-128, 128, (64,), dtype=torch.int8)
    out = torch.zeros(64, dtype=torch.int64)
    kernel[(1,)](x, out, 9, PURE=pure, BLOCK=64)
    assert torch.equal(out, (~(x ^ 4)).long() + x.long() + 9)
