"""tl.dot of fp32 (as tf32) and of bytes on whole warpgroups (wgmma, sm_90a), in all memory orders.

wgmma reads such operands only along their depth: a B stored along N is exchanged with A.
"""

import re

import pytest
import torch

import minitriton as triton
import minitriton.language as tl

pytestmark = pytest.mark.usefixtures("hopper")


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """A program for each tile, as in Triton's tutorial: rows and columns past the end wrap."""
    columns = tl.cdiv(N, BLOCK_N)
    offs_m = tl.program_id(0) // columns * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + ((offs_m % M)[:, None] * stride_am + offs_k[None, :] * stride_ak)
    b_ptrs = b_ptr + (offs_k[:, None] * stride_bk + (offs_n % N)[None, :] * stride_bn)
    acc = tl.zeros((BLOCK_M, BLOCK_N), SUM)
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        a = tl.load(a_ptrs, mask=offs_k[None, :] < K - k * BLOCK_K, other=0.0)
        b = tl.load(b_ptrs, mask=offs_k[:, None] < K - k * BLOCK_K, other=0.0)
        acc = tl.dot(a, b, acc)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    inside = (offs_m[:, None] < M) & (offs_n[None, :] < N)
    tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], acc, mask=inside)


def numbers(dtype, *shape):
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=dtype)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max + 1, shape, dtype=dtype)


def matrix(dtype, rows, columns, device, *, turned):
    """A random matrix, stored along its rows or (turned) along its columns."""
    if turned:
        return numbers(dtype, columns, rows).to(device).T
    return numbers(dtype, rows, columns).to(device)


def run(device, dtype, shape, blocks, a_t=False, b_t=False, **options):
    """(largest error relative to the sum of magnitudes, the compiled kernel)."""
    m, n, k = shape
    a = matrix(dtype, m, k, device, turned=a_t)
    b = matrix(dtype, k, n, device, turned=b_t)
    kind = torch.float32 if dtype.is_floating_point else torch.int32
    c = torch.full((m, n), float("nan") if dtype.is_floating_point else -7, device=device).to(kind)
    grid = (triton.cdiv(m, blocks[0]) * triton.cdiv(n, blocks[1]),)
    compiled = matmul_kernel[grid](
        a, b, c, m, n, k, *a.stride(), *b.stride(), *blocks,
        tl.float32 if dtype.is_floating_point else tl.int32, **options,
    )  # fmt: skip
    expected, scale = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    return ((c.double() - expected).abs() / scale.clamp(min=1)).max().item(), compiled


def bound(dtype):
    """Two operands rounded to 11 bits; whole numbers are exact."""
    return 1e-3 if dtype.is_floating_point else 0


def products(compiled, kind):
    return len(re.findall(rf"wgmma\.mma_async\S*\.{kind} ", compiled.asm["ptx"]))


KINDS = [
    (torch.float32, "f32.tf32.tf32", 32), (torch.int8, "s32.s8.s8", 128),
    (torch.uint8, "s32.u8.u8", 128),
]  # fmt: skip


@pytest.mark.parametrize(("a_t", "b_t"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize(("dtype", "kind", "row"), KINDS, ids=str)
@pytest.mark.parametrize("stages", [2, 3])
def test_memory_orders(device, dtype, kind, row, stages, a_t, b_t):
    shape, blocks = (80, 112, 2 * row + row // 2), (64, 64, row)
    error, compiled = run(device, dtype, shape, blocks, a_t, b_t, num_warps=4, num_stages=stages)
    assert error <= bound(dtype) and products(compiled, kind) == 4
    assert "mma.sync" not in compiled.asm["ptx"]


@pytest.mark.parametrize(("dtype", "kind", "row"), KINDS[:2], ids=str)
def test_no_operand_along_its_depth(device, dtype, kind, row):
    shape, blocks = (64, 64, 2 * row), (64, 64, row)
    error, compiled = run(device, dtype, shape, blocks, True, False, num_warps=4, num_stages=2)
    assert error <= bound(dtype) and "wgmma" not in compiled.asm["ptx"]
    reason = "dot not by wgmma: neither operand is stored along the depth"
    assert reason in str(compiled.metadata["remarks"])


TILES = [  # blocks in rows of 32 fp32, warps, instructions if B is stored along N, and along K
    ((64, 64, 1), 4, 4, 4), ((128, 128, 1), 4, 8, 8), ((128, 128, 1), 8, 4, 4),
    ((128, 256, 1), 8, 8, 4), ((256, 128, 1), 8, 4, 8), ((16, 64, 2), 4, 8, 0),
    ((64, 16, 1), 4, 0, 4), ((64, 256, 1), 16, 4, 0),
]  # fmt: skip


@pytest.mark.parametrize("b_t", [False, True])
@pytest.mark.parametrize(("dtype", "kind", "row"), KINDS[:2], ids=str)
@pytest.mark.parametrize(("blocks", "warps", "count", "turned_count"), TILES, ids=str)
def test_tiles(device, dtype, kind, row, blocks, warps, count, turned_count, b_t):
    m, n, rows = blocks
    shape = (m + 16, n + 16, 2 * row * rows)
    blocks = (m, n, rows * row)
    error, compiled = run(device, dtype, shape, blocks, b_t=b_t, num_warps=warps, num_stages=3)
    assert error <= bound(dtype) and products(compiled, kind) == (turned_count if b_t else count)


@pytest.mark.parametrize("b_t", [False, True])
@pytest.mark.parametrize(("dtype", "row"), [(torch.float32, 32), (torch.int8, 128)], ids=str)
def test_producer_warps(device, dtype, row, b_t):
    shape, blocks = (512, 128, 3 * row), (256, 128, row)
    error, compiled = run(device, dtype, shape, blocks, b_t=b_t, num_warps=8, num_stages=3)
    assert error <= bound(dtype) and "setmaxnreg" in compiled.asm["ptx"]


def test_operands_of_tf32_are_rounded_to_nearest(device):
    """TMA rounds what wgmma would cut off: the errors have no sign in common."""
    a = torch.rand(64, 256, device=device) + 0.5
    b = torch.rand(256, 64, device=device) + 0.5
    c = torch.empty(64, 64, device=device)
    compiled = matmul_kernel[(1,)](
        a, b, c, 64, 64, 256, *a.stride(), *b.stride(), 64, 64, 32, tl.float32, num_stages=3
    )
    error = ((c.double() - a.double() @ b.double()) / (a.double() @ b.double())).mean()
    assert abs(error) < 2e-5 and products(compiled, "f32.tf32.tf32") == 4  # cut off: 7e-4


def test_sums_of_bytes_wrap(device):
    a = torch.full((64, 128), -128, dtype=torch.int8, device=device)
    b = torch.full((128, 64), -128, dtype=torch.int8, device=device)
    c = torch.empty(64, 64, dtype=torch.int32, device=device)

    @triton.jit
    def from_kernel(a_ptr, b_ptr, c_ptr, K, START: tl.constexpr):
        i, k = tl.arange(0, 64), tl.arange(0, 64)
        acc = tl.full((64, 64), START, tl.int32)
        for start in range(0, K, 64):
            x = tl.load(a_ptr + i[:, None] * K + (start + k)[None, :])
            acc = tl.dot(x, tl.load(b_ptr + (start + k)[:, None] * 64 + i[None, :]), acc)
        tl.store(c_ptr + i[:, None] * 64 + i[None, :], acc)

    compiled = from_kernel[(1,)](a, b, c, 128, 2**31 - 1, num_stages=2)
    assert (c == 2**31 - 1 + 128 * 128 * 128 - 2**32).all()
    assert products(compiled, "s32.s8.s8") == 2


@triton.jit
def forms_kernel(
    x_ptr, y_ptr, c_ptr, K, FORM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y is [K, BLOCK]; loops around tl.dot that differ in what else uses its operands and sums."""
    i, k = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    other = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, K, BLOCK_K):
        x = tl.load(x_ptr + i[:, None] * K + (start + k)[None, :])
        y = tl.load(y_ptr + (start + k)[:, None] * BLOCK + i[None, :])
        if FORM == "scaled":
            acc = tl.dot(x, y, acc * 0.5)
        elif FORM == "added":
            acc += tl.dot(x, y)
        elif FORM == "read":
            acc = tl.dot(x, y, acc)
            other += acc
        elif FORM == "a sum of two":
            acc = tl.dot(x, y, tl.dot(x, y, acc))
        elif FORM == "two sums":
            acc = tl.dot(x, y, acc)
            other = tl.dot(y.T, x.T, other)
        elif FORM == "computed left":
            deep = tl.load(y_ptr + i[:, None] * K + (start + k)[None, :])  # y as [BLOCK, K]
            acc = tl.dot(x * 1.5, deep.T, acc)
        elif FORM == "also added up":
            acc = tl.dot(x, y, acc)
            other += tl.sum(x, axis=1)[:, None]
        elif FORM == "also precise":
            acc = tl.dot(x, y, acc)
            other = tl.dot(x, y, other, input_precision="tf32x3")
        else:
            acc = tl.dot(x, y, acc, input_precision=FORM)
    c_ptrs = c_ptr + i[:, None] * BLOCK + i[None, :]
    tl.store(c_ptrs, acc)
    tl.store(c_ptrs + BLOCK * BLOCK, other)


def expected_forms(form, x, y, step):
    acc = torch.zeros(x.shape[0], x.shape[0], dtype=torch.float64)
    other = acc.clone()
    for start in range(0, x.shape[1], step):
        a, b = x[:, start : start + step], y[start : start + step]
        if form == "scaled":
            acc = acc * 0.5 + a @ b
        elif form == "computed left":
            acc += 1.5 * a @ y.reshape(x.shape)[:, start : start + step].T
        else:
            acc += (1 + (form == "a sum of two")) * a @ b
        if form == "read":
            other += acc
        elif form == "two sums":
            other += b.T @ a.T
        elif form == "also added up":
            other += a.sum(1)[:, None]
        elif form == "also precise":
            other += a @ b
    return torch.stack([acc, other])


FORMS = {  # products of a step of 32, two instructions deep
    "scaled": 4, "added": 4, "read": 4, "a sum of two": 8, "two sums": 8, "computed left": 4,
    "also added up": 0, "also precise": 0, "ieee": 0, "tf32x3": 0,
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_the_loop(device, form):
    block, step, k = 64, 32, 160
    x, y = torch.randn(block, k), torch.randn(k, block)
    c = torch.full((2, block, block), float("nan"), device=device)
    compiled = forms_kernel[(1,)](
        x.to(device), y.to(device), c, k, FORM=form, BLOCK=block, BLOCK_K=step,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    expected = expected_forms(form, x.double(), y.double(), step)
    largest = (c.cpu().double() - expected).abs().amax((1, 2))
    assert largest[0] < (1e-4 if form in ("ieee", "tf32x3") else 0.1)
    assert largest[1] < (1e-4 if form.startswith("also") else 0.2)
    assert products(compiled, "f32.tf32.tf32") == FORMS[form]


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, T, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    rows, d = tl.arange(0, ROWS), tl.arange(0, D)
    q = tl.load(q_ptr + rows[:, None] * D + d[None, :])
    top, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)
    for start in range(0, T, BLOCK):
        j = start + tl.arange(0, BLOCK)
        s = tl.dot(q, tl.load(k_ptr + j[:, None] * D + d[None, :]).T)
        new = tl.maximum(top, tl.max(s, axis=1))
        p = tl.exp2(s - new[:, None])
        scale = tl.exp2(top - new)
        total = total * scale + tl.sum(p, axis=1)
        acc = tl.dot(p, tl.load(v_ptr + j[:, None] * D + d[None, :]), acc * scale[:, None])
        top = new
    tl.store(out_ptr + rows[:, None] * D + d[None, :], acc / total[:, None])


@pytest.mark.parametrize("warps", [4, 8])
def test_attention_in_tf32(device, warps):
    """The scores go to warpgroups; the values, along whose rows they are summed, do not."""
    d, rows = 32, 16 * warps
    q, k, v = (torch.randn(n, d, device=device) for n in (rows, 96, 96))
    out = torch.full((rows, d), float("nan"), device=device)
    compiled = attention_kernel[(1,)](
        q, k, v, out, 96, D=d, ROWS=rows, BLOCK=32, num_warps=warps, num_stages=2
    )
    weights = torch.softmax((q.double() @ k.double().T) * 0.6931471805599453, dim=1)
    assert (out.double() - weights @ v.double()).abs().max() < 1e-2
    assert products(compiled, "f32.tf32.tf32") == 4 and "mma.sync" in compiled.asm["ptx"]


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e30, 1e-40])
def test_special_values(device, value):
    a, b = torch.randn(64, 64, device=device), torch.randn(64, 64, device=device)
    a[3, 5] = value
    c = torch.empty(64, 64, device=device)
    compiled = matmul_kernel[(1,)](
        a, b, c, 64, 64, 64, *a.stride(), *b.stride(), 64, 64, 32, tl.float32, num_stages=2
    )
    assert products(compiled, "f32.tf32.tf32") == 4
    expected = a.double() @ b.double()
    if value == 1e30:
        assert torch.allclose(c[3].double(), expected[3], rtol=2e-3)
    elif value == 1e-40:
        assert (c - expected).abs().max() < 0.05
    else:
        assert (c[3].isnan() | c[3].isinf()).all() and c[:3].isfinite().all()


def test_without_tma_nothing_rounds_fp32(device, monkeypatch):
    monkeypatch.setenv("MINITRITON_TMA", "0")
    error, compiled = run(device, torch.float32, (64, 64, 96), (64, 64, 32), num_stages=4)
    assert error < 1e-3 and "wgmma" not in compiled.asm["ptx"]
    assert "threads would copy fp32 without rounding it" in str(compiled.metadata["remarks"])
    error, compiled = run(device, torch.int8, (64, 64, 384), (64, 64, 128), num_stages=4)
    assert error == 0 and products(compiled, "s32.s8.s8") == 4
    assert "cp.async.bulk" not in compiled.asm["ptx"]


@pytest.mark.parametrize(("n", "k"), [(66, 96), (64, 98)])
def test_strides_that_no_tensor_map_has(device, n, k):
    error, compiled = run(device, torch.float32, (64, n, k), (64, 64, 32), num_stages=3)
    by_threads = "cvt.rna.tf32" in compiled.asm["ptx"]  # B, that goes through registers anyway
    assert error < 1e-3 and by_threads
    assert products(compiled, "f32.tf32.tf32") == (4 if n == 66 else 0)
