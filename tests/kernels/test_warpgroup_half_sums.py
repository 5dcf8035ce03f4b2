"""tl.dot with fp16 sums on whole warpgroups (wgmma, sm_90a): of fp16, and of fp8.

What is expected rounds to fp16 after each instruction, 32 bytes of the depth: exactly what the
emulator does. Tensor cores may round within one, so that there each of `n` roundings is off by at
most 2^-11 of the sum so far, which is at most that of all magnitudes; twice that is allowed.
"""

import re

import numpy as np
import pytest
import torch

import minitriton as triton
import minitriton.language as tl
from minitriton import execute

pytestmark = pytest.mark.usefixtures("hopper")
HALF, E4M3, E5M2 = torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
NAMES = {HALF: "f16", E4M3: "e4m3", E5M2: "e5m2"}
STEP_BYTES = 32  # of the depth, in one instruction


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """A program for each tile, as in Triton's tutorial: rows and columns past the end wrap."""
    columns = tl.cdiv(N, BLOCK_N)
    offs_m = tl.program_id(0) // columns * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + ((offs_m % M)[:, None] * stride_am + offs_k[None, :] * stride_ak)
    b_ptrs = b_ptr + (offs_k[:, None] * stride_bk + (offs_n % N)[None, :] * stride_bn)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float16)
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        a = tl.load(a_ptrs, mask=offs_k[None, :] < K - k * BLOCK_K, other=0.0)
        b = tl.load(b_ptrs, mask=offs_k[:, None] < K - k * BLOCK_K, other=0.0)
        if ADDED:
            acc += tl.dot(a, b, out_dtype=tl.float16)
        else:
            acc = tl.dot(a, b, acc, out_dtype=tl.float16)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    inside = (offs_m[:, None] < M) & (offs_n[None, :] < N)
    tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], acc, mask=inside)


def matrix(dtype, rows, columns, device, *, turned):
    """A random matrix, stored along its rows or (turned) along its columns."""
    if turned:
        return torch.randn(columns, rows).to(dtype).to(device).T
    return torch.randn(rows, columns).to(dtype).to(device)


def summed(a, b, start=None):
    """start + a @ b, rounded to fp16 after each instruction; float64."""
    step = STEP_BYTES // a.element_size()
    a, b = a.cpu().double(), b.cpu().double()
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64) if start is None else start
    for k in range(0, a.shape[1], step):
        total = rounded(total + a[:, k : k + step] @ b[k : k + step])
    return total


def rounded(exact):
    """float64 to fp16 and back; torch goes by way of fp32."""
    return torch.from_numpy(exact.numpy().astype(np.float16)).double()


def added_up(a, b, block):
    """Sums of blocks of the depth, added up in fp16."""
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
    for k in range(0, a.shape[1], block):
        total = rounded(total + summed(a[:, k : k + block], b[k : k + block]))
    return total


def check(c, a, b, expected):
    error = (c.cpu().double() - expected).abs()
    if c.device.type == "cpu":
        assert error.max() == 0
        return
    count = a.shape[1] * a.element_size() / STEP_BYTES
    magnitudes = a.cpu().double().abs() @ b.cpu().double().abs()
    assert (error <= 2 * count * 2**-11 * magnitudes).all()


def run(device, dtypes, shape, blocks, a_t=False, b_t=False, *, added=False, **options):
    """The compiled kernel; its result has been checked."""
    m, n, k = shape
    a = matrix(dtypes[0], m, k, device, turned=a_t)
    b = matrix(dtypes[-1], k, n, device, turned=b_t)
    c = torch.full((m, n), float("nan"), dtype=HALF, device=device)
    grid = (triton.cdiv(m, blocks[0]) * triton.cdiv(n, blocks[1]),)
    compiled = matmul_kernel[grid](
        a, b, c, m, n, k, *a.stride(), *b.stride(), *blocks, added, num_stages=3, **options
    )
    check(c, a, b, added_up(a, b, blocks[2]) if added else summed(a, b))
    return compiled


def products(compiled, types="f16.f16"):
    return len(re.findall(rf"wgmma\.mma_async\S*\.f16\.{types} ", compiled.asm["ptx"]))


@pytest.mark.parametrize(("a_t", "b_t"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("added", [False, True])
def test_memory_orders(device, a_t, b_t, added):
    shape, blocks = (80, 112, 208), (64, 64, 64)
    compiled = run(device, (HALF,), shape, blocks, a_t, b_t, added=added, num_warps=4)
    assert products(compiled) == 4 and "mma.sync" not in compiled.asm["ptx"]


@pytest.mark.parametrize("dtypes", [(E4M3,), (E5M2,), (E4M3, E5M2)], ids=str)
def test_fp8(device, dtypes):
    compiled = run(device, dtypes, (80, 112, 320), (64, 64, 128), b_t=True, num_warps=4)
    assert products(compiled, f"{NAMES[dtypes[0]]}.{NAMES[dtypes[-1]]}") == 4


TILES = [  # blocks, warps, instructions
    ((64, 8, 64), 4, 0), ((64, 16, 64), 4, 4), ((128, 128, 64), 4, 8), ((128, 256, 64), 4, 8),
    ((128, 256, 64), 8, 4), ((256, 256, 32), 8, 4), ((64, 96, 64), 4, 4), ((192, 64, 32), 4, 6),
    ((64, 256, 64), 16, 0), ((64, 384, 32), 4, 0),
]  # fmt: skip


@pytest.mark.parametrize(("blocks", "warps", "count"), TILES, ids=str)
def test_tiles_of_half_sums(device, blocks, warps, count):
    m, n, k = blocks
    compiled = run(device, (HALF,), (m + 16, n + 16, 2 * k), blocks, num_warps=warps)
    assert products(compiled) == count


@pytest.mark.parametrize(
    ("dtype", "blocks", "warps"),
    [(HALF, (128, 128, 64), 4), (HALF, (128, 256, 64), 8), (E4M3, (128, 128, 128), 8)],
    ids=str,
)
@pytest.mark.parametrize("ctas", [1, 2])
def test_persistent_producers(device, monkeypatch, dtype, blocks, warps, ctas):
    """A CTA runs several programs; four warps play ping-pong."""
    monkeypatch.setattr(execute, "EMULATED_CTAS", ctas)
    shape = (2 * blocks[0] + 32, blocks[1] + 32, 3 * blocks[2] + 32)
    compiled = run(device, (dtype,), shape, blocks, b_t=dtype != HALF, num_warps=warps)
    assert "setmaxnreg" in compiled.asm["ptx"] and products(compiled, f"{NAMES[dtype]}.\\S*")
    assert compiled.metadata.get("consumer_groups", 1) == (2 if warps == 4 else 1)
    assert "store by TMA" in str(compiled.metadata["remarks"])


def test_no_depth(device):
    """Sums that no product has made yet are zero."""
    a, b = torch.randn(64, 64, device=device).half(), torch.randn(64, 64, device=device).half()
    c = torch.full((64, 64), float("nan"), dtype=HALF, device=device)
    compiled = matmul_kernel[(1,)](
        a, b, c, 64, 64, 0, *a.stride(), *b.stride(), 64, 64, 32, False, num_stages=3
    )
    assert products(compiled) == 2 and not c.any()


@triton.jit
def forms_kernel(
    x_ptr, y_ptr, c_ptr, K, FORM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y is [K, BLOCK]; loops around tl.dot that differ in what else uses its sums."""
    i, k = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    acc = tl.full((BLOCK, BLOCK), 0.5 if FORM == "begun" else 0.0, tl.float16)
    before = tl.zeros((BLOCK, BLOCK), tl.float16)
    other = tl.zeros((BLOCK, BLOCK), tl.float32)
    for _ in range(0, 2 if FORM == "nested" else 1):
        for start in range(0, K, BLOCK_K):
            x = tl.load(x_ptr + i[:, None] * K + (start + k)[None, :])
            y = tl.load(y_ptr + (start + k)[:, None] * BLOCK + i[None, :])
            if FORM == "scaled":
                acc = tl.dot(x, y, acc * 0.5, out_dtype=tl.float16)
            elif FORM == "read":
                acc = tl.dot(x, y, acc, out_dtype=tl.float16)
                other += acc
            elif FORM == "both":
                acc = tl.dot(x, y, acc, out_dtype=tl.float16)
                other = tl.dot(x, y, other)
            elif FORM == "left operand":
                p = tl.dot(x, y, out_dtype=tl.float16)
                acc = tl.dot(p, tl.load(y_ptr + i[:, None] * BLOCK + i[None, :]), acc,
                             out_dtype=tl.float16)  # fmt: skip
            elif FORM == "left operand before":
                w = tl.load(y_ptr + i[:, None] * BLOCK + i[None, :])
                acc = tl.dot(before, w, acc, out_dtype=tl.float16)
                before = tl.dot(x, y, out_dtype=tl.float16)
            else:
                acc = tl.dot(x, y, acc, out_dtype=tl.float16)
    if FORM == "two loops":
        for start in range(0, K, BLOCK_K):
            x = tl.load(x_ptr + i[:, None] * K + (start + k)[None, :])
            y = tl.load(y_ptr + (start + k)[:, None] * BLOCK + i[None, :])
            acc = tl.dot(x, y, acc, out_dtype=tl.float16)
    c_ptrs = c_ptr + i[:, None] * BLOCK + i[None, :]
    tl.store(c_ptrs, acc)
    tl.store(c_ptrs + BLOCK * BLOCK, other)


def expected_forms(form, x, y, step):
    acc = torch.full((x.shape[0],) * 2, 0.5 if form == "begun" else 0.0, dtype=torch.float64)
    before, other = torch.zeros_like(acc), torch.zeros_like(acc)
    for _ in range(2 if form in ("nested", "two loops") else 1):
        for start in range(0, x.shape[1], step):
            a, b = x[:, start : start + step], y[start : start + step]
            if form.startswith("left operand"):
                left = before if form.endswith("before") else summed(a, b)
                acc = summed(left.half(), y[: x.shape[0]], acc)
                before = summed(a, b)
                continue
            acc = summed(a, b, acc * 0.5 if form == "scaled" else acc)
            if form == "read":
                other += acc
            elif form == "both":
                other += a.double() @ b.double()
    return acc, other


FORMS = {  # fp16 products of a step of 32, two instructions deep
    "plain": 2, "begun": 2, "scaled": 2, "read": 2, "both": 2, "left operand": 6,
    "left operand before": 6, "nested": 2, "two loops": 4,
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_the_loop(device, form):
    block, step, k = 64, 32, 160
    x, y = torch.randn(block, k).half(), torch.randn(k, block).half()
    c = torch.full((2, block, block), float("nan"), device=device)
    compiled = forms_kernel[(1,)](
        x.to(device), y.to(device), c, k, FORM=form, BLOCK=block, BLOCK_K=step,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    acc, other = expected_forms(form, x, y, step)
    # values up to 600 that a fp16 sum of 64 products, or of 20 instructions, may miss by 2^-11 each
    assert (c[0].cpu() - acc).abs().max() <= (0 if device == "cpu" else 2.0)
    assert (c[1].cpu() - other).abs().max() <= (1e-3 if device == "cpu" else 8.0)
    assert products(compiled) == FORMS[form]


def test_overflow_is_infinite(device):
    """Sums end at 65504, although each product and the later sum would fit."""
    a, b = (torch.full((64, 64), 64.0, dtype=HALF, device=device) for _ in "ab")
    a[:, 32:] = -64
    c = torch.empty(64, 64, dtype=HALF, device=device)
    compiled = matmul_kernel[(1,)](
        a, b, c, 64, 64, 64, *a.stride(), *b.stride(), 64, 64, 32, False, num_stages=3
    )
    assert products(compiled) == 2 and (c == float("inf")).all()
