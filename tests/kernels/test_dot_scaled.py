"""tl.dot_scaled: every format and packing, scales, NaN, loops that reach the tensor cores."""

import pytest
import torch

import minitriton as triton
import minitriton.language as tl

NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
TYPES = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def operand(rows, columns, form, packed, device):
    """What is passed, fp4 packed along dimension `packed`, and the numbers, fp64."""
    if form == "e2m1":
        codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
        low, high = codes.unflatten(packed, (-1, 2)).unbind(packed + 1)
        return (low | high << 4).contiguous().to(device), NUMBERS[codes.long()].double().to(device)
    values = torch.randn(rows, columns).to(TYPES[form])
    return values.to(device), values.double().to(device)


def scales(rows, depth, device):
    """Exponents around 127, and the powers of two for each number along K."""
    found = torch.randint(120, 134, (rows, depth // 32), dtype=torch.uint8, device=device)
    return found, (2.0 ** (found.double() - 127)).repeat_interleave(32, 1)


@triton.jit
def tile_kernel(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, c_ptr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
    A_ALONG_K: tl.constexpr, B_ALONG_K: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """One tile; adds to what is in c."""
    A_ROWS: tl.constexpr = M // 2 if A == "e2m1" and not A_ALONG_K else M
    A_COLUMNS: tl.constexpr = K // 2 if A == "e2m1" and A_ALONG_K else K
    B_ROWS: tl.constexpr = K // 2 if B == "e2m1" and B_ALONG_K else K
    B_COLUMNS: tl.constexpr = N // 2 if B == "e2m1" and not B_ALONG_K else N
    m, n, g = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K // 32)
    a_rows, a_columns = tl.arange(0, A_ROWS), tl.arange(0, A_COLUMNS)
    a = tl.load(a_ptr + a_rows[:, None] * A_COLUMNS + a_columns[None, :])
    b_rows, b_columns = tl.arange(0, B_ROWS), tl.arange(0, B_COLUMNS)
    b = tl.load(b_ptr + b_rows[:, None] * B_COLUMNS + b_columns[None, :])
    a_scale = None
    b_scale = None
    if a_scale_ptr is not None:
        a_scale = tl.load(a_scale_ptr + m[:, None] * (K // 32) + g[None, :])
    if b_scale_ptr is not None:
        b_scale = tl.load(b_scale_ptr + n[:, None] * (K // 32) + g[None, :])
    places = c_ptr + m[:, None] * N + n[None, :]
    c = tl.dot_scaled(
        a, a_scale, A, b, b_scale, B, tl.load(places), fast_math=FAST,
        lhs_k_pack=A_ALONG_K, rhs_k_pack=B_ALONG_K,
    )  # fmt: skip
    tl.store(places, c)


@pytest.mark.parametrize(
    ("a_form", "b_form", "a_k", "b_k", "scaled"),
    [
        ("e2m1", "e2m1", True, True, "ab"),
        ("e2m1", "e4m3", False, True, "ab"),
        ("e5m2", "e2m1", True, False, "ab"),
        ("e4m3", "e5m2", True, True, "ab"),
        ("bf16", "e2m1", True, True, "b"),
        ("bf16", "bf16", True, True, "b"),
        ("fp16", "e2m1", True, False, "b"),
        ("e2m1", "fp16", True, True, "a"),
        ("e4m3", "e4m3", True, True, ""),
    ],
)
@pytest.mark.parametrize("shape", [(32, 16, 64), (64, 64, 64), (16, 64, 128)], ids=str)
def test_formats(a_form, b_form, a_k, b_k, scaled, shape, device):
    m, n, k = shape
    a, x = operand(m, k, a_form, 1 if a_k else 0, device)
    b, y = operand(k, n, b_form, 0 if b_k else 1, device)
    a_scale = b_scale = None
    if "a" in scaled:
        a_scale, powers = scales(m, k, device)
        x = x * powers
    if "b" in scaled:
        b_scale, powers = scales(n, k, device)
        y = y * powers.T
    c = torch.randn(m, n, device=device)
    expected = (c.double() + x @ y).float()
    tile_kernel[(1,)](a, a_scale, b, b_scale, c, m, n, k, a_form, b_form, a_k, b_k, False)
    torch.testing.assert_close(c, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("fast", [False, True])
def test_extreme_scales(fast, device):
    """255 is NaN, or infinity; 0 gives zeros."""
    a = torch.full((32, 64), 0x22, dtype=torch.uint8, device=device)  # ones
    b = torch.ones(128, 32, device=device).to(torch.float8_e4m3fn)
    a_scale = torch.full((32, 4), 127, dtype=torch.uint8, device=device)
    a_scale[3, 1], a_scale[4, 2] = 255, 0
    b_scale = torch.full((32, 4), 128, dtype=torch.uint8, device=device)
    c = torch.zeros(32, 32, device=device)
    tile_kernel[(1,)](a, a_scale, b, b_scale, c, 32, 32, 128, "e2m1", "e4m3", True, True, fast)
    expected = torch.full_like(c, 256.0)
    expected[3], expected[4] = float("inf") if fast else float("nan"), 192.0
    assert torch.equal(c.nan_to_num(-1.0), expected.nan_to_num(-1.0))


@triton.jit
def product_kernel(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, c_ptr, M, N, K, A: tl.constexpr, B: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """c = a [M, K] @ b [N, K] transposed; fp4 along K."""
    PER_A: tl.constexpr = 2 if A == "e2m1" else 1
    PER_B: tl.constexpr = 2 if B == "e2m1" else 1
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    a_k, b_k = tl.arange(0, BLOCK_K // PER_A), tl.arange(0, BLOCK_K // PER_B)
    g = tl.arange(0, BLOCK_K // 32)
    c = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        a = tl.load(a_ptr + m[:, None] * (K // PER_A) + (k // PER_A + a_k)[None, :])
        b = tl.load(b_ptr + n[None, :] * (K // PER_B) + (k // PER_B + b_k)[:, None])
        if a_scale_ptr is not None:
            a_scale = tl.load(a_scale_ptr + m[:, None] * (K // 32) + (k // 32 + g)[None, :])
        else:
            a_scale = None
        b_scale = tl.load(b_scale_ptr + n[:, None] * (K // 32) + (k // 32 + g)[None, :])
        c = tl.dot_scaled(a, a_scale, A, b, b_scale, B, c)
    tl.store(c_ptr + m[:, None] * N + n[None, :], c)


@pytest.mark.parametrize(("a_form", "b_form"), [("bf16", "e2m1"), ("e4m3", "e2m1")])
def test_a_loop(a_form, b_form, device):
    a, x, b, y, given = problem(a_form, b_form, 64, 128, 192, device)
    c = torch.empty(64, 128, device=device)
    product_kernel[(1, 2)](a, given[0], b, given[1], c, 64, 128, 192, a_form, b_form, 64, 64, 64)
    torch.testing.assert_close(c, (x @ y.T).float(), rtol=1e-5, atol=1e-3)


def problem(a_form, b_form, m, n, k, device):
    """Operands, their numbers, and scales, of a only where it is not of 16 bits."""
    a, x = operand(m, k, a_form, 1, device)
    b, y = operand(n, k, b_form, 1, device)
    b_scale, powers = scales(n, k, device)
    y = y * powers
    a_scale = None
    if a_form not in ("bf16", "fp16"):
        a_scale, powers = scales(m, k, device)
        x = x * powers
    return a, x, b, y, (a_scale, b_scale)


def test_warpgroups_take_the_scaled_side_from_registers(hopper, device):
    a, x, b, y, given = problem("bf16", "e2m1", 128, 128, 256, device)
    c = torch.empty(128, 128, device=device)
    compiled = product_kernel[(1, 1)](
        a, given[0], b, given[1], c, 128, 128, 256, "bf16", "e2m1", 128, 128, 64, num_warps=8
    )
    torch.testing.assert_close(c, (x @ y.T).float(), rtol=1e-4, atol=1e-2)
    assert "wgmma.mma_async" in compiled.ptx and "mma.sync" not in compiled.ptx


@triton.jit
def nv_kernel(a_ptr, a_scale_ptr, b_ptr, c_ptr, M: tl.constexpr, K: tl.constexpr):
    """Scales of type e4m3, one for 16 numbers."""
    m, k, g = tl.arange(0, M), tl.arange(0, K // 2), tl.arange(0, K // 16)
    a = tl.load(a_ptr + m[:, None] * (K // 2) + k[None, :])
    a_scale = tl.load(a_scale_ptr + m[:, None] * (K // 16) + g[None, :])
    b = tl.load(b_ptr + tl.arange(0, K)[:, None] * 16 + tl.arange(0, 16)[None, :])
    c = tl.dot_scaled(a, a_scale, "e2m1", b, None, "bf16")
    tl.store(c_ptr + m[:, None] * 16 + tl.arange(0, 16)[None, :], c)


def test_blocks_of_16(device):
    a, x = operand(32, 64, "e2m1", 1, device)
    b, y = operand(64, 16, "bf16", 0, device)
    a_scale = torch.rand(32, 4).to(torch.float8_e4m3fn).to(device)
    c = torch.empty(32, 16, device=device)
    nv_kernel[(1,)](a, a_scale, b, c, 32, 64)
    x = (x * a_scale.double().repeat_interleave(16, 1)).bfloat16().double()
    torch.testing.assert_close(c, (x @ y).float(), rtol=1e-5, atol=1e-4)


@triton.jit
def batch_kernel(a_ptr, a_scale_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr):
    """Two products of depth 64."""
    z, m = tl.arange(0, 2)[:, None, None], tl.arange(0, M)[None, :, None]
    k, n = tl.arange(0, 64)[None, :, None], tl.arange(0, N)[None, None, :]
    a = tl.load(a_ptr + (z * M + m) * 32 + tl.arange(0, 32)[None, None, :])
    a_scale = tl.load(a_scale_ptr + (z * M + m) * 2 + tl.arange(0, 2)[None, None, :])
    b = tl.load(b_ptr + (z * 64 + k) * N + n)
    c = tl.dot_scaled(a, a_scale, "e2m1", b, None, "bf16")
    tl.store(c_ptr + (z * M + m) * N + n, c)


def test_batches(device):
    a, x = operand(64, 64, "e2m1", 1, device)
    b, y = operand(128, 16, "bf16", 0, device)
    a_scale, powers = scales(64, 64, device)
    c = torch.empty(2, 32, 16, device=device)
    batch_kernel[(1,)](a, a_scale, b, c, 32, 16)
    expected = (x * powers).unflatten(0, (2, 32)) @ y.unflatten(0, (2, 64))
    torch.testing.assert_close(c, expected.float(), rtol=1e-5, atol=1e-4)
