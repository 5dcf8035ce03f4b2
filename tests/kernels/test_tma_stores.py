"""Epilogues that TMA stores (sm_90a): sizes, types, orders, batches; launches it does not fit."""

import pytest
import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.tools.tensor_descriptor import TensorDescriptor

BF16, BF16_TYPE = torch.bfloat16, tl.constexpr(tl.bfloat16)

pytestmark = pytest.mark.usefixtures("hopper")


@triton.jit
def product(
    a_ptr, b_ptr, rows, columns, K, stride_a, stride_b,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, M, N,
):  # fmt: skip
    """fp32 A[rows] B[:, columns], with rows and columns that wrap round."""
    at = tl.arange(0, BK)
    a_ptrs = a_ptr + (rows % M)[:, None] * stride_a + at[None, :]
    b_ptrs = b_ptr + at[:, None] * stride_b + (columns % N)[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, tl.cdiv(K, BK)):
        a = tl.load(a_ptrs, mask=at[None, :] < K - k * BK, other=0.0)
        b = tl.load(b_ptrs, mask=at[:, None] < K - k * BK, other=0.0)
        acc = tl.dot(a, b, acc)
        a_ptrs += BK
        b_ptrs += BK * stride_b
    return acc


@triton.jit
def product_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_a, stride_b, stride_c, scale_ptr, residual_ptr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    COLUMN_MAJOR: tl.constexpr = False, FUSED: tl.constexpr = False,
):  # fmt: skip
    """C = A B; FUSED: C = A B scale[row] + residual, where the residual is C-shaped."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = product(a_ptr, b_ptr, rows, columns, K, stride_a, stride_b, BM, BN, BK, M, N)
    mask = (rows[:, None] < M) & (columns[None, :] < N)
    if COLUMN_MAJOR:
        c_ptrs = c_ptr + rows[:, None] + columns[None, :] * stride_c
    else:
        c_ptrs = c_ptr + rows[:, None] * stride_c + columns[None, :]
    if FUSED:
        acc *= tl.load(scale_ptr + rows, mask=rows < M)[:, None]
        at = residual_ptr + rows[:, None] * stride_c + columns[None, :]
        acc += tl.load(at, mask=mask, other=0.0)
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=mask)


def operands(device, m, n, k, dtype=BF16):
    """a [m, k] and b [k, n] whose rows take multiples of 16 elements."""
    a = torch.randn(m, -(-k // 16) * 16, device=device).to(dtype)[:, :k]
    b = torch.randn(k, -(-n // 16) * 16, device=device).to(dtype)[:, :n]
    return a, b


def result(device, m, n, dtype=BF16, pad=0, column_major=False):
    """NaNs: c [m, n], and all of the memory that its rows (columns) lie in."""
    outer, inner = (n, m) if column_major else (m, n)
    inner = -(-inner // 16) * 16 + pad
    whole = torch.full((outer, inner), float("nan"), device=device).to(dtype)
    c = (whole.T if column_major else whole)[:m, :n]
    return c, whole


def run(a, b, c, blocks=(64, 64, 64), extras=(None, None), flags=(False, False), **options):
    (m, k), n = a.shape, b.shape[1]
    stride = c.stride(1) if flags[0] else c.stride(0)
    grid = (triton.cdiv(m, blocks[0]), triton.cdiv(n, blocks[1]))
    extras = [c if e is None else e for e in extras]
    return product_kernel[grid](
        a, b, c, m, n, k, a.stride(0), b.stride(0), stride, *extras, *blocks, *flags, **options
    )


def check(a, b, c, whole=None, expected=None):
    exact = a.double() @ b.double() if expected is None else expected
    eps = {BF16: 2**-8, torch.float16: 2**-11}.get(c.dtype, 2**-20)
    bound = eps * exact.abs() + 1e-5 * (a.double().abs() @ b.double().abs())
    assert ((c.double() - exact).abs() <= bound).all()
    if whole is not None:  # nothing beside c was written
        assert whole.double().isnan().sum() == whole.numel() - c.numel()


def stored(compiled):
    """Boxes that TMA stores."""
    return compiled.asm["ptx"].count(".global.shared::cta.bulk_group")


def threads_store(compiled):
    return "st.global" in compiled.asm["ptx"]


SIZES = [
    ((80, 112, 208), (64, 64, 64), {}, 1),
    ((67, 48, 33), (64, 64, 32), {"num_stages": 2}, 1),
    ((129, 208, 72), (128, 128, 32), {"num_warps": 8}, 2),
    ((64, 48, 64), (64, 32, 64), {}, 1),
]


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize(("shape", "blocks", "options", "boxes"), SIZES, ids=str)
def test_sizes(device, shape, blocks, options, boxes, dtype):
    m, n, k = shape
    a, b = operands(device, m, n, k, dtype)
    c, whole = result(device, m, n, dtype, pad=16)
    compiled = run(a, b, c, blocks, **options)
    check(a, b, c, whole)
    assert stored(compiled) == boxes and not threads_store(compiled)
    assert compiled.asm["ptx"].count("stmatrix") == blocks[0] * blocks[1] // (
        32 * 8 * options.get("num_warps", 4)
    )


@pytest.mark.parametrize("landing", ["early", "late", "random"])
@pytest.mark.parametrize(("stages", "pieces"), [(3, 1), (4, 4)])
def test_a_large_tile(device, landing, stages, pieces, monkeypatch):
    """Warp specialised and persistent: each CTA stores several tiles, each in so many pieces."""
    monkeypatch.setenv("MINITRITON_LANDING", landing)
    a, b = operands(device, 270, 304, 96)
    c, whole = result(device, 270, 304, pad=16)
    compiled = run(a, b, c, (128, 256, 64), num_warps=8, num_stages=stages)
    check(a, b, c, whole)
    ptx = compiled.asm["ptx"]
    assert "setmaxnreg" in ptx and ("cp.async.bulk.wait_group.read 1" in ptx) == (pieces > 1)
    assert ptx.count("cp.async.bulk.commit_group") == pieces and stored(compiled) == 4
    assert not threads_store(compiled)


@pytest.mark.parametrize(("rows", "dtype"), [(192, BF16), (208, torch.float32)], ids=str)
def test_columns_first(device, rows, dtype):
    a, b = operands(device, rows, 144, 80)
    c, whole = result(device, rows, 144, dtype, column_major=True)
    compiled = run(a, b, c, (128, 128, 32), flags=(True, False), num_warps=8)
    check(a, b, c, whole)
    transposing = "stmatrix.sync.aligned.m8n8.x4.trans" in compiled.asm["ptx"]
    assert stored(compiled) and transposing == (dtype == BF16)


def test_bytes(device):
    a, b = operands(device, 100, 80, 64)
    whole = torch.zeros(100, 96, dtype=torch.float8_e4m3fn, device=device)
    compiled = run(a, b, whole[:, :80], (64, 128, 64))
    exact = a.double() @ b.double()
    error = (whole[:, :80].double() - exact).abs()
    assert (error <= exact.abs() / 16 + 2**-9).all() and stored(compiled)
    assert not whole[:, 80:].double().any()


@triton.jit
def descriptor_kernel(a, b, c, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    i, j = tl.program_id(0) * BM, tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(a.load([i, k]), b.load([k, j]), acc)
    c.store([i, j], acc.to(BF16_TYPE))


def test_descriptors(device):
    a, b = operands(device, 80, 112, 192)
    c, whole = result(device, 80, 112)
    make = TensorDescriptor.from_tensor
    compiled = descriptor_kernel[(2, 2)](
        make(a, [64, 64]), make(b, [64, 64]), make(c, [64, 64]), 192, 64, 64, 64
    )
    check(a, b, c, whole)
    assert stored(compiled) == 1 and not threads_store(compiled)


def test_scale_and_residual(device):
    a, b = operands(device, 100, 80, 80)
    c, whole = result(device, 100, 80)
    scale = torch.rand(100, device=device) + 0.5
    residual = torch.randn(100, 80, device=device)
    compiled = run(a, b, c, extras=(scale, residual), flags=(False, True))
    exact = a.double() @ b.double() * scale[:, None].double() + residual.double()
    check(a, b, c, whole, exact)
    assert stored(compiled)


def test_what_stays_with_the_threads(device):
    """fp32 suits memory as it is; rows of 4 bytes past 16 have no tensor map; TMA would write the
    rest of 16 bytes in which a row ends."""
    a, b = operands(device, 80, 72, 64)
    c, whole = result(device, 80, 72, torch.float32)
    compiled = run(a, b, c)
    check(a, b, c, whole)
    assert not stored(compiled) and threads_store(compiled)
    a, b = operands(device, 67, 43, 33)
    c, whole = result(device, 67, 43, pad=16)
    compiled = run(a, b, c)
    check(a, b, c, whole)
    assert not stored(compiled) and threads_store(compiled)
    a, b = operands(device, 80, 72, 64)
    whole = torch.full((80, 74), float("nan"), device=device).to(BF16)
    compiled = run(a, b, whole[:, :72])
    check(a, b, whole[:, :72], whole)
    assert not stored(compiled) and threads_store(compiled)


def test_launches_that_no_tensor_map_fits(device):
    """Rows that run backwards: the kernel without TMA takes them."""
    a, b = operands(device, 80, 64, 64)
    c, _ = result(device, 80, 64)
    assert stored(run(a, b, c))
    check(a, b, c)
    c.fill_(float("nan"))
    product_kernel[(2, 1)](a, b, c[-1], 80, 64, 64, 64, 64, -64, c, c, 64, 64, 64)
    check(a, b, c.flip(0))
    product_kernel[(1, 1)](a, b, c.fill_(1), 0, 64, 64, 64, 64, 64, c, c, 64, 64, 64)
    assert (c == 1).all()


@triton.jit
def tiles_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_a, stride_b, stride_c, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PROMISED: tl.constexpr,
):  # fmt: skip
    """Every program takes tiles until none is left; PROMISED: arguments do not overlap."""
    across = tl.cdiv(N, BN)
    count = tl.cdiv(M, BM) * across
    for tile in tl.range(
        tl.program_id(0), count, tl.num_programs(0), num_stages=3 if PROMISED else None
    ):
        rows = tile // across * BM + tl.arange(0, BM)
        columns = tile % across * BN + tl.arange(0, BN)
        acc = product(a_ptr, b_ptr, rows, columns, K, stride_a, stride_b, BM, BN, BK, M, N)
        mask = (rows[:, None] < M) & (columns[None, :] < N)
        c_ptrs = c_ptr + rows[:, None] * stride_c + columns[None, :]
        tl.store(c_ptrs, acc.to(BF16_TYPE), mask=mask)


@pytest.mark.parametrize("landing", ["early", "late", "random"])
@pytest.mark.parametrize(("blocks", "warps"), [((64, 64, 64), 4), ((128, 256, 32), 8)], ids=str)
def test_epilogues_again_and_again(device, landing, blocks, warps, monkeypatch):
    monkeypatch.setenv("MINITRITON_LANDING", landing)
    m, n, k = 2 * blocks[0] + 9, blocks[1] + 48, 80
    a, b = operands(device, m, n, k)
    c, whole = result(device, m, n)
    for promised in (True, False):
        whole.fill_(float("nan"))
        compiled = tiles_kernel[(2,)](
            a, b, c, m, n, k, a.stride(0), b.stride(0), c.stride(0), *blocks, promised,
            num_warps=warps,
        )  # fmt: skip
        check(a, b, c, whole)
        assert bool(stored(compiled)) == promised
        in_turn = "cp.async.bulk.wait_group.read 1" in compiled.asm["ptx"]
        assert in_turn == (promised and blocks[1] == 256)
    remarks = compiled.metadata["remarks"]
    assert "store not by TMA: a later load may read what it stores" in remarks


@triton.jit
def several_kernel(
    a_ptr, b_ptr, c_ptr, d_ptr, sums_ptr, M, N, K, stride_a, stride_b, stride_c,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """C = A B, D = 2 C, and then sums of columns, which warps add up in shared memory."""
    rows, columns = tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    acc = product(a_ptr, b_ptr, rows, columns, K, stride_a, stride_b, BM, BN, BK, M, N)
    mask = (rows[:, None] < M) & (columns[None, :] < N)
    at = rows[:, None] * stride_c + columns[None, :]
    tl.store(c_ptr + at, acc.to(BF16_TYPE), mask=mask)
    tl.store(d_ptr + at, (acc * 2).to(BF16_TYPE), mask=mask)
    sums = tl.sum(tl.where(mask, acc, 0.0), 0)
    tl.store(sums_ptr + columns, sums, mask=columns < N)


@pytest.mark.parametrize("landing", ["early", "late", "random"])
def test_several_stores_and_then_scratch(device, landing, monkeypatch):
    monkeypatch.setenv("MINITRITON_LANDING", landing)
    a, b = operands(device, 60, 208, 80)
    (c, whole), (d, other) = result(device, 60, 208), result(device, 60, 208)
    sums = torch.full((208,), float("nan"), device=device)
    compiled = several_kernel[(2,)](
        a, b, c, d, sums, 60, 208, 80, a.stride(0), b.stride(0), c.stride(0), 64, 128, 32
    )
    check(a, b, c, whole)
    check(a, b, d, other, 2 * (a.double() @ b.double()))
    assert (sums.double() - (a.double() @ b.double()).sum(0)).abs().max() < 1e-2
    assert stored(compiled) == 4


def test_runs_are_bitwise_equal(device):
    """On a GPU a race would show as a run that differs."""
    size, repeats = (1024, 400) if device == "cuda" else (160, 2)
    a, b = operands(device, size, size, size)
    c, whole = result(device, size, size)
    arguments = (a, b, c, size, size, size, *[size] * 3, 64, 128, 64, True)
    tiles_kernel[(7,)](*arguments)
    first = c.clone()
    for _ in range(repeats):
        whole.fill_(float("nan"))
        tiles_kernel[(7,)](*arguments)
        assert torch.equal(c, first)
    check(a, b, c)


@triton.jit
def batch_kernel(
    a_ptr, b_ptr, c_ptr, M, N, batch_a, batch_b, batch_c, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """C[z] = A[z] B[z] with K = BK, only if `TURNED` is not zero through scf.if."""
    z = tl.program_id(2)
    rows, columns = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN)
    at = tl.arange(0, BK)
    a = tl.load(a_ptr + z * batch_a + rows[:, None] * BK + at[None, :], mask=rows[:, None] < M,
                other=0.0)  # fmt: skip
    b = tl.load(b_ptr + z * batch_b + at[:, None] * BN + columns[None, :])
    acc = tl.dot(a, b)
    c_ptrs = c_ptr + z * batch_c + rows[:, None] * BN + columns[None, :]
    if N > 0:
        tl.store(c_ptrs, acc.to(BF16_TYPE), mask=rows[:, None] < M)


def test_batches_and_branches(device):
    a = torch.randn(3, 80, 64, device=device).to(BF16)
    b = torch.randn(3, 64, 64, device=device).to(BF16)
    c = torch.full((3, 80, 64), float("nan"), device=device).to(BF16)
    arguments = (a.stride(0), b.stride(0), c.stride(0), 64, 64, 64, False)
    batch_kernel[(2, 1, 3)](a, b, c, 80, 0, *arguments)
    assert c.isnan().all()
    compiled = batch_kernel[(2, 1, 3)](a, b, c, 80, 64, *arguments)
    for i in range(3):
        check(a[i], b[i], c[i])
    assert stored(compiled) == 1
