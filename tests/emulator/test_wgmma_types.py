"""wgmma on tf32, on bytes and with f16 sums against numpy: which bits count, how sums wrap or
round, what is refused."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from minitriton.runtime import assembler
from minitriton.runtime.emulator import UnsupportedPTX
from tests.emulator.ptx_harness import kernel, run

ROWS, COLUMNS, ROW_BYTES = 64, 8, 32
#: To shared memory: A at 0, B at 2048, both swizzled in `inp`; behind them A as it is.
TILE = ".shared .align 1024 .b8 tile[4096];"
START = """
    mov.u32 %r10, tile;
    shl.b32 %r5, %r1, 5;
    cvt.u64.u32 %d5, %r5;
    add.s64 %d5, %d5, %d11;
    add.u32 %r5, %r5, %r10;
    ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%d5];
    st.shared.v4.b32 [%r5], {%r20, %r21, %r22, %r23};
    ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%d5+16];
    st.shared.v4.b32 [%r5+16], {%r20, %r21, %r22, %r23};
    fence.proxy.async.shared::cta;
    bar.sync 0;
    shr.u32 %r7, %r10, 4;
    cvt.u64.u32 %d5, %r7;
    or.b64 %d5, %d5, 0xC000001000010000;
    add.s64 %d6, %d5, 128;
    setp.eq.u32 %p1, 0, 0;
    shr.u32 %r8, %r1, 5;
    and.b32 %r9, %r1, 31;
    shr.u32 %r11, %r9, 2;
    mad.lo.u32 %r11, %r8, 16, %r11;
    and.b32 %r12, %r9, 3;
    mad.lo.u32 %r11, %r11, 8, %r12;
    mul.wide.u32 %d7, %r11, 4;
    add.s64 %d7, %d7, %d11;
    ld.global.b32 %r20, [%d7+4096];
    ld.global.b32 %r21, [%d7+4352];
    ld.global.b32 %r22, [%d7+4112];
    ld.global.b32 %r23, [%d7+4368];
    mul.wide.u32 %d8, %r1, 16;
    add.s64 %d8, %d8, %d10;
    ld.global.v4.b32 {%r30, %r31, %r32, %r33}, [%d8];
"""
END = """
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    st.global.v4.b32 [%d8], {%r30, %r31, %r32, %r33};
"""


def product(types: str, rest: str, depth: int, *, registers: bool) -> str:
    left = "{%r20, %r21, %r22, %r23}" if registers else "%d5"
    text = f"wgmma.mma_async.sync.aligned.m64n8k{depth}.{types} "
    text += f"{{%r30, %r31, %r32, %r33}}, {left}, %d6, %p1{rest};"
    ptx = kernel(f"{START}    wgmma.fence.sync.aligned;\n    {text}{END}", TILE)
    return ptx.replace(".version 8.3", ".version 8.4")  # bytes of two kinds


def swizzled(matrix: np.ndarray) -> np.ndarray:
    """Rows of 32 bytes with their halves exchanged where bit 7 of the address is set."""
    raw = np.ascontiguousarray(matrix).view(np.uint8).reshape(-1)
    at = np.arange(len(raw))
    return raw[at ^ (at >> 7 & 1) << 4]


def inputs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """What the kernels read; b is [8, depth]."""
    inp = np.zeros(4096 + 2048, np.uint8)
    inp[:2048], inp[2048 : 2048 + 256] = swizzled(a), swizzled(b)
    inp[4096:] = np.ascontiguousarray(a).view(np.uint8).reshape(-1)
    return inp


def results(ptx: str, a: np.ndarray, b: np.ndarray, start: np.ndarray) -> np.ndarray:
    """[64, 8] sums of `start` and A times B."""
    inp = inputs(a, b)
    thread, register = np.arange(128)[:, None], np.arange(4)[None, :]
    row = thread // 32 * 16 + thread % 32 // 4 + 8 * (register // 2)
    column = 2 * (thread % 4) + register % 2
    out = np.ascontiguousarray(start[row, column])
    run(ptx, out, inp, block=128)
    found = np.empty_like(start)
    found[row, column] = out
    return found


@pytest.mark.parametrize("registers", [False, True])
def test_tf32(registers: bool) -> None:
    rng = np.random.default_rng(registers)
    a, b = (rng.standard_normal((n, 8)).astype(np.float32) for n in (ROWS, COLUMNS))
    start = rng.standard_normal((ROWS, COLUMNS)).astype(np.float32)
    ptx = product("f32.tf32.tf32", ", 1, 1", 8, registers=registers)
    assembler.assemble(ptx, "sm_90a", "k")
    x, y = ((v.view(np.uint32) & 0xFFFFE000).view(np.float32).astype(np.float64) for v in (a, b))
    expected = (start + x @ y.T).astype(np.float32)
    assert (results(ptx, a, b, start) == expected).all()
    assert (expected != (start + a.astype(np.float64) @ b.T).astype(np.float32)).any()


@pytest.mark.parametrize("registers", [False, True])
@pytest.mark.parametrize("types", ["s8.s8", "u8.u8", "s8.u8", "u8.s8"])
def test_bytes(types: str, registers: bool) -> None:
    rng = np.random.default_rng(len(types) + registers)
    kinds = [np.dtype(np.int8 if name == "s8" else np.uint8) for name in types.split(".")]
    a, b = (
        rng.integers(np.iinfo(k).min, np.iinfo(k).max, (n, 32), k, endpoint=True)
        for n, k in zip((ROWS, COLUMNS), kinds, strict=True)
    )
    start = rng.integers(-(2**31), 2**31, (ROWS, COLUMNS)).astype(np.int32)
    start[:2] = [[2**31 - 1], [-(2**31)]]
    ptx = product(f"s32.{types}", "", 32, registers=registers)
    assembler.assemble(ptx, "sm_90a", "k")
    total = start + a.astype(np.int64) @ b.astype(np.int64).T
    assert (results(ptx, a, b, start) == total.astype(np.int32)).all()
    assert (total != total.astype(np.int32)).any()  # some sums wrap


def half_sums(ptx: str, a: np.ndarray, b: np.ndarray, start: np.ndarray) -> np.ndarray:
    """As `results`, for sums of f16, of which a thread has two registers."""
    ptx = ptx.replace("{%r30, %r31, %r32, %r33}, %d5", "{%r30, %r31}, %d5")
    ptx = ptx.replace("{%r30, %r31, %r32, %r33}, {%r20", "{%r30, %r31}, {%r20")
    assembler.assemble(ptx, "sm_90a", "k")
    thread, half = np.arange(128)[:, None, None], np.arange(2)[None, None, :]
    row = thread // 32 * 16 + thread % 32 // 4 + 8 * np.arange(2)[None, :, None]
    row, column = np.broadcast_arrays(row, 2 * (thread % 4) + half)
    words = np.zeros((128, 4), np.uint32)
    words[:, :2] = np.ascontiguousarray(start[row, column]).view(np.uint32)[:, :, 0]
    run(ptx, words, inputs(a, b), block=128)
    found = np.empty_like(start)
    found[row, column] = np.ascontiguousarray(words[:, :2]).view(np.float16).reshape(row.shape)
    return found


@pytest.mark.parametrize("registers", [False, True])
@pytest.mark.parametrize(("types", "kinds"), [
    ("f16.f16", "f16 f16"), ("e4m3.e4m3", "e4m3 e4m3"), ("e4m3.e5m2", "e4m3 e5m2"),
])  # fmt: skip
def test_sums_of_f16(types: str, kinds: str, registers: bool) -> None:
    """An instruction is summed exactly, then rounded once, to nearest even."""
    numpy = {"f16": np.float16, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
    left, right = (np.dtype(numpy[kind]) for kind in kinds.split())
    depth = ROW_BYTES // left.itemsize
    rng = np.random.default_rng(depth + registers)
    a = rng.standard_normal((ROWS, depth)).astype(left)
    b = rng.standard_normal((COLUMNS, depth)).astype(right)
    start = rng.standard_normal((ROWS, COLUMNS)).astype(np.float16)
    start[:2] = [[65504.0], [np.inf]]
    a[2], b[:, 0] = 0, 1
    a[2, 0], start[2] = 1, 2048  # halfway between 2048 and 2050 for column 0
    if left == np.float16:
        rest = ", 1, 1, 0" if registers else ", 1, 1, 0, 0"
    else:
        rest = ", 1, 1"
    found = half_sums(product(f"f16.{types}", rest, depth, registers=registers), a, b, start)
    exact = start.astype(np.float64) + a.astype(np.float64) @ b.astype(np.float64).T
    with np.errstate(over="ignore"):
        assert (found == exact.astype(np.float16)).all()
    assert found[2, 0] == 2048 and np.isinf(found[1]).all()


@pytest.mark.parametrize(
    ("types", "rest", "depth"),
    [
        ("f32.tf32.tf32", ", 1, 1, 0, 0", 8), ("f32.tf32.tf32", ", -1, 1", 8),
        ("f32.tf32.tf32", "", 8), ("f32.tf32.tf32", ", 1, 1", 16), ("f32.s8.s8", "", 32),
        ("s32.s8.s8", ", 1, 1", 32), ("s32.s8.s8", "", 16), ("s32.tf32.tf32", ", 1, 1", 8),
        ("satfinite.s32.s8.s8", "", 32), ("f32.f16.f16", ", 1, 1, 0, 0", 8),
        ("f16.bf16.bf16", ", 1, 1, 0, 0", 16), ("f16.tf32.tf32", ", 1, 1", 8),
        ("f16.f16.f16", ", 1, 1, 0, 0", 16),  # with the registers of f32 sums
    ],
)  # fmt: skip
def test_other_forms_are_refused(types: str, rest: str, depth: int) -> None:
    nothing = np.zeros((ROWS, ROW_BYTES), np.uint8)
    with pytest.raises(UnsupportedPTX):
        results(
            product(types, rest, depth, registers=False), nothing, nothing[:COLUMNS],
            np.zeros((ROWS, COLUMNS), np.int32),
        )  # fmt: skip


def test_columns_that_bytes_do_not_have() -> None:
    ptx = product("s32.s8.s8", "", 32, registers=False)
    registers = ", ".join(f"%r{n}" for n in range(30, 50))
    wide = ptx.replace("m64n8k32", "m64n40k32").replace(
        "{%r30, %r31, %r32, %r33}, %d5", f"{{{registers}}}, %d5"
    )
    nothing = np.zeros((ROWS, ROW_BYTES), np.uint8)
    with pytest.raises(UnsupportedPTX):
        results(wide, nothing, nothing[:COLUMNS], np.zeros((ROWS, COLUMNS), np.int32))
