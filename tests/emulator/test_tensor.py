"""mma.sync, ldmatrix, stmatrix and movmatrix: fragments built element by element from matrices.

The layouts are spelled here as the PTX ISA lists them per shape, apart from the product's rule.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from minitriton.runtime.emulator import numerics, tensor

WARPS = 3
DTYPES = {
    "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16), "tf32": np.dtype("f4"),
    "f32": np.dtype("f4"), "f64": np.dtype("f8"), "s8": np.dtype("i1"), "u8": np.dtype("u1"),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "s32": np.dtype("i4"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet():
    with numerics.quiet():
        yield


def a_place(shape: str, ptx_type: str, lane: int, i: int) -> tuple[int, int]:
    """Row and column of element a_i of a lane, by the formulas of the PTX ISA."""
    group, t = lane >> 2, lane % 4
    if ptx_type in ("f16", "bf16"):
        row = group if i < 2 or 4 <= i < 6 else group + 8
        return row, t * 2 + (i & 1) + (8 if i >= 4 else 0)
    if ptx_type == "tf32":
        return (group if i in (0, 2) else group + 8), (t if i < 2 else t + 4)
    if ptx_type == "f64":
        if shape == "m8n8k4":
            return group, t
        return (group if i % 2 == 0 else group + 8), i // 2 * 4 + t
    if shape == "m8n8k16":
        return group, t * 4 + (i & 3)
    row = group if i < 4 or 8 <= i < 12 else group + 8
    return row, t * 4 + (i & 3) + (0 if i < 8 else 16)


def b_place(shape: str, ptx_type: str, lane: int, i: int) -> tuple[int, int]:
    group, t = lane >> 2, lane % 4
    if ptx_type in ("f16", "bf16"):
        return t * 2 + (i & 1) + (0 if i < 2 else 8), group
    if ptx_type in ("tf32", "f64"):
        return t + 4 * i, group
    return t * 4 + (i & 3) + (0 if i < 4 else 16), group


def c_place(lane: int, i: int) -> tuple[int, int]:
    return (lane >> 2) + (0 if i < 2 else 8), (lane % 4) * 2 + (i & 1)


def pack(matrix: np.ndarray, place, per_lane: int) -> np.ndarray:
    """[warps, rows, columns] to registers [n, warps, 32]."""
    lanes = np.empty((matrix.shape[0], 32, per_lane), matrix.dtype)
    for lane in range(32):
        for i in range(per_lane):
            row, column = place(lane, i)
            lanes[:, lane, i] = matrix[:, row, column]
    word = "u8" if matrix.dtype.itemsize == 8 else "u4"
    return np.ascontiguousarray(np.moveaxis(lanes.view(word), 2, 0))


def unpack(registers: np.ndarray, dtype: np.dtype, rows: int) -> np.ndarray:
    lanes = np.ascontiguousarray(np.moveaxis(registers, 0, 2)).view(dtype)
    matrix = np.empty((registers.shape[1], rows, 8), dtype)
    for lane in range(32):
        for i in range(lanes.shape[2]):
            matrix[:, *c_place(lane, i)] = lanes[:, lane, i]
    return matrix


def values(rng: np.random.Generator, ptx_type: str, shape: tuple[int, ...]) -> np.ndarray:
    dtype = DTYPES[ptx_type]
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, shape, endpoint=True).astype(dtype)
    value = rng.normal(size=shape).astype(dtype)
    if ptx_type == "tf32":
        value = (value.view("u4") & np.uint32(0xFFFFE000)).view("f4")
    return value


CASES = [
    *[("f16", "f16", s, c, d) for s in ("m16n8k8", "m16n8k16") for c, d in (
        ("f32", "f32"), ("f16", "f16"), ("f16", "f32"), ("f32", "f16"))],
    *[("bf16", "bf16", s, "f32", "f32") for s in ("m16n8k8", "m16n8k16")],
    *[("tf32", "tf32", s, "f32", "f32") for s in ("m16n8k4", "m16n8k8")],
    *[(a, b, s, "s32", "s32") for s in ("m8n8k16", "m16n8k16", "m16n8k32")
      for a in ("s8", "u8") for b in ("s8", "u8")],
    *[(a, b, s, c, c) for s in ("m16n8k16", "m16n8k32") for a in ("e4m3", "e5m2")
      for b in ("e4m3", "e5m2") for c in ("f32", "f16")],
    *[("f64", "f64", s, "f64", "f64") for s in ("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16")],
]  # fmt: skip


@pytest.mark.parametrize(("a_type", "b_type", "shape", "c_type", "d_type"), CASES)
def test_mma_equals_matmul(a_type: str, b_type: str, shape: str, c_type: str, d_type: str) -> None:
    rng = np.random.default_rng(len(shape) + len(a_type))
    rows, depth = int(shape[1:].split("n")[0]), int(shape.split("k")[1])
    a = values(rng, a_type, (WARPS, rows, depth))
    b = values(rng, b_type, (WARPS, depth, 8))
    c = values(rng, c_type, (WARPS, rows, 8))
    registers = [
        pack(a, lambda lane, i: a_place(shape, a_type, lane, i), rows * depth // 32),
        pack(b, lambda lane, i: b_place(shape, b_type, lane, i), depth * 8 // 32),
        pack(c, c_place, rows * 8 // 32),
    ]
    run = tensor.mma_sync(shape, a_type, b_type, c_type, d_type, ("row", "col"))
    out = unpack(run(*registers), DTYPES[d_type], rows)
    if d_type == "s32":
        wide = np.matmul(a.astype(np.int64), b.astype(np.int64)) + c
        assert np.array_equal(out, wide.astype(np.int32))
        clipped = tensor.mma_sync(shape, a_type, b_type, c_type, d_type, satfinite=True)
        got = unpack(clipped(*registers), DTYPES[d_type], rows)
        assert np.array_equal(got, np.clip(wide, -(1 << 31), (1 << 31) - 1))
        return
    exact = np.matmul(a.astype(np.float64), b.astype(np.float64)) + c.astype(np.float64)
    if d_type == "f64":
        assert np.allclose(out, exact, rtol=1e-13, atol=1e-13)
    else:
        assert np.array_equal(out, exact.astype(DTYPES[d_type])) or np.allclose(
            out.astype(float), exact, rtol=2**-10 if d_type == "f16" else 2**-22, atol=2**-20
        )


def test_mma_special_values() -> None:
    run = tensor.mma_sync("m16n8k8", "f16", "f16", "f32", "f32")
    ones = np.full((2, 1, 32), 0x3C003C00, np.uint32)
    b = np.full((1, 1, 32), 0x3C003C00, np.uint32)
    c = np.zeros((4, 1, 32), np.uint32)
    assert np.array_equal(run(ones, b, c).view(np.float32), np.full((4, 1, 32), 8.0))
    ones[0, 0, 0] = 0x7C003C00  # row 0 gets +inf
    out = run(ones, b, c).view(np.float32)
    assert np.all(np.isinf(out[:2, 0, :4])) and np.all(out[2:] == 8) and np.all(out[:, 0, 4:] == 8)
    b[...] = 0
    assert np.all(run(ones, b, c)[:2, 0, :4] == 0x7FFFFFFF)


def test_mma_ignores_the_low_bits_of_tf32() -> None:
    run = tensor.mma_sync("m16n8k4", "tf32", "tf32", "f32", "f32")
    a = np.full((2, 1, 32), 0x3F801FFF, np.uint32)
    b = np.full((1, 1, 32), 0x3F801FFF, np.uint32)
    assert np.all(run(a, b, np.zeros((4, 1, 32), np.uint32)).view(np.float32) == 4.0)


@pytest.mark.parametrize(
    "case",
    [
        ("m16n8k16", "f16", "bf16", "f32", "f32"),
        ("m16n8k16", "bf16", "bf16", "f16", "f16"),
        ("m16n8k4", "f16", "f16", "f32", "f32"),
        ("m16n8k16", "s8", "s8", "f32", "f32"),
    ],
)
def test_mma_rejects_what_ptx_lacks(case: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=case[0]):
        tensor.mma_sync(*case)
    with pytest.raises(ValueError, match="col"):
        tensor.mma_sync("m16n8k16", "f16", "f16", "f32", "f32", ("col", "row"))


@pytest.mark.parametrize("num", [1, 2, 4])
def test_ldmatrix(num: int) -> None:
    matrices = np.arange(num * 64, dtype=np.uint16).reshape(num, 8, 8)
    memory = matrices.tobytes()
    address = 16 * np.arange(8 * num)  # lane 8i + r holds the address of row r of matrix i
    lanes, offsets = tensor.ldmatrix_gather(num, trans=False)
    assert lanes.shape == offsets.shape == (num, 32)
    for register in range(num):
        for lane in range(32):
            at = int(address[lanes[register, lane]] + offsets[register, lane])
            row, column = lane // 4, 2 * (lane % 4)
            pair = np.frombuffer(memory[at : at + 4], np.uint16)
            assert pair.tolist() == matrices[register, row, column : column + 2].tolist()
    lanes, offsets = tensor.ldmatrix_gather(num, trans=True)
    assert lanes.shape == offsets.shape == (2, num, 32)
    for half in range(2):
        for register in range(num):
            for lane in range(32):
                at = int(address[lanes[half, register, lane]] + offsets[half, register, lane])
                got = np.frombuffer(memory[at : at + 2], np.uint16)[0]
                assert got == matrices[register].T[lane // 4, 2 * (lane % 4) + half]


@pytest.mark.parametrize("trans", [False, True])
def test_stmatrix_inverts_ldmatrix(trans: bool) -> None:
    lanes, offsets = tensor.stmatrix_scatter(4, trans)
    assert len({*zip(lanes.ravel().tolist(), offsets.ravel().tolist(), strict=True)}) == lanes.size
    assert np.array_equal(np.unique(lanes), np.arange(32))


def test_movmatrix_transposes() -> None:
    rng = np.random.default_rng(8)
    matrix = rng.integers(0, 1 << 16, (WARPS, 8, 8)).astype(np.uint16)
    registers = matrix.reshape(WARPS, 64).view(np.uint32)
    assert registers.shape == (WARPS, 32)
    got = np.ascontiguousarray(tensor.movmatrix(registers)).view(np.uint16).reshape(WARPS, 8, 8)
    assert np.array_equal(got, np.swapaxes(matrix, 1, 2))
