"""Plain pointer loads that TMA makes (sm_90a): loops, sizes, and launches that it does not fit."""

import pytest
import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.tools.tensor_descriptor import TensorDescriptor

BF16 = torch.bfloat16


pytestmark = pytest.mark.usefixtures("hopper")


@triton.jit
def _tile(
    a_ptr, b_ptr, c_ptr, pid_m, pid_n, M, N, K, stride_am, stride_bk, stride_bn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of C [M, N] as in Triton's tutorial: offsets that wrap round, carried pointers."""
    offs_m = (pid_m * BM + tl.arange(0, BM)) % M
    offs_n = (pid_n * BN + tl.arange(0, BN)) % N
    offs_k = tl.arange(0, BK)
    a_ptrs = a_ptr + (offs_m[:, None] * stride_am + offs_k[None, :])
    b_ptrs = b_ptr + (offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, tl.cdiv(K, BK)):
        a = tl.load(a_ptrs, mask=offs_k[None, :] < K - k * BK, other=0.0)
        b = tl.load(b_ptrs, mask=offs_k[:, None] < K - k * BK, other=0.0)
        acc = tl.dot(a, b, acc)
        a_ptrs += BK
        b_ptrs += BK * stride_bk
    rows, columns = pid_m * BM + tl.arange(0, BM), pid_n * BN + tl.arange(0, BN)
    mask = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], acc, mask=mask)


@triton.jit
def tiles_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_bk, stride_bn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Every program takes tiles until none is left: the loop over K starts again and again."""
    columns = tl.cdiv(N, BN)
    for tile in range(tl.program_id(0), tl.cdiv(M, BM) * columns, tl.num_programs(0)):
        _tile(
            a_ptr, b_ptr, c_ptr, tile // columns, tile % columns, M, N, K, stride_am, stride_bk,
            stride_bn, BM, BN, BK,
        )  # fmt: skip


def operands(device, m, n, k, b_t, pad=0):
    """a [m, k], b [k, n] of either order with rows `pad` longer, and c full of NaN."""
    a = torch.randn(m, k + pad, device=device).to(BF16)[:, :k]
    b = torch.randn(n, k + pad, device=device).to(BF16)[:, :k].T
    if not b_t:
        b = torch.randn(k, n + pad, device=device).to(BF16)[:, :n]
    return a, b, torch.full((m, n), float("nan"), device=device)


def run(a, b, c, blocks=(64, 64, 64), programs=None, **options):
    (m, k), n = a.shape, b.shape[1]
    tiles = triton.cdiv(m, blocks[0]) * triton.cdiv(n, blocks[1])
    return tiles_kernel[(programs or tiles,)](
        a, b, c, m, n, k, a.stride(0), *b.stride(), *blocks, **options
    )


def error_of(a, b, c):
    """Relative to the sum of magnitudes."""
    scale = a.double().abs() @ b.double().abs() + 1e-30
    return ((c.double() - a.double() @ b.double()).abs() / scale).max().item()


def copies(compiled):
    return compiled.asm["ptx"].count("cp.async.bulk.tensor")


@pytest.mark.parametrize("b_t", [False, True])
@pytest.mark.parametrize(
    ("shape", "blocks", "options"),
    [
        ((80, 112, 208), (64, 64, 64), {}),
        ((64, 16, 16), (64, 64, 64), {"num_stages": 4}),
        ((144, 272, 96), (128, 256, 32), {"num_warps": 8}),
        ((70, 48, 160), (64, 32, 128), {"num_stages": 2}),
    ],
    ids=str,
)
def test_shapes(device, shape, blocks, options, b_t):
    a, b, c = operands(device, *shape, b_t, pad=16)
    compiled = run(a, b, c, blocks, **options)
    assert error_of(a, b, c) < 1e-6 and copies(compiled)
    assert "cp.async.cg" not in compiled.asm["ptx"] and "cp.async.ca" not in compiled.asm["ptx"]


@pytest.mark.parametrize("landing", ["early", "late", "random"])
def test_loops_that_start_again(device, landing, monkeypatch):
    monkeypatch.setenv("MINITRITON_LANDING", landing)
    a, b, c = operands(device, 192, 128, 80, False)
    compiled = run(a, b, c, programs=2)
    assert error_of(a, b, c) < 1e-6 and copies(compiled)
    assert "mbarrier.inval" in compiled.asm["ptx"]


def test_runs_are_bitwise_equal(device):
    """On a GPU a race would show as a run that differs."""
    size, repeats = (1024, 600) if device == "cuda" else (128, 2)
    a, b, c = operands(device, size, size, size, False)
    run(a, b, c, programs=7)
    first = c.clone()
    for _ in range(repeats):
        run(a, b, c.fill_(float("nan")), programs=7)
        assert torch.equal(c, first)
    assert error_of(a, b, c) < 1e-6


def test_launches_that_no_tensor_map_fits(device):
    """An empty K, and rows that run backwards: the same kernel without TMA takes them."""
    a, b, c = operands(device, 64, 64, 128, False)
    compiled = run(a, b, c)
    assert copies(compiled) and error_of(a, b, c) < 1e-6
    tiles_kernel[(1,)](a, b, c, 64, 64, 0, 128, 64, 1, 64, 64, 64)
    assert not c.any()
    tiles_kernel[(1,)](a[-1], b, c, 64, 64, 128, -128, 64, 1, 64, 64, 64)
    assert error_of(a.flip(0), b, c) < 1e-6
    run(a, b, c)
    assert error_of(a, b, c) < 1e-6


def test_a_base_off_the_mark_is_copied_by_threads(device):
    whole, b, c = operands(device, 65, 64, 136, False)
    a = whole.view(-1)[8 : 8 + 64 * 128].view(64, 128)  # 16 bytes further: still a multiple
    b = b[:128]
    both = copies(run(a, b, c[:64]))
    assert error_of(a, b, c[:64]) < 1e-6
    a = whole.view(-1)[2 : 2 + 64 * 128].view(64, 128)
    assert 0 < copies(run(a, b, c[:64])) < both and error_of(a, b, c[:64]) < 1e-6


@triton.jit
def batch_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, batch_a, batch_b, stride_a, stride_b,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """C[z] = A[z] B[z]; addresses are made anew in every iteration."""
    z = tl.program_id(2).to(tl.int64)
    rows, columns = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        at = k + tl.arange(0, BK)
        inside = (rows[:, None] < M) & (at[None, :] < K)
        a_ptrs = a_ptr + z * batch_a + rows[:, None] * stride_a + at[None, :]
        a = tl.load(a_ptrs, mask=inside, other=0.0)
        inside = (at[:, None] < K) & (columns[None, :] < N)
        b_ptrs = b_ptr + z * batch_b + at[:, None] * stride_b + columns[None, :]
        acc = tl.dot(a, tl.load(b_ptrs, mask=inside, other=0.0), acc)
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(c_ptr + z * M * N + rows[:, None] * N + columns[None, :], acc, mask=inside)


def test_batches(device):
    """Rows past the end of a matrix are zeros, not the next matrix."""
    a = torch.randn(3, 80, 144, device=device).to(BF16)
    b = torch.randn(3, 144, 48, device=device).to(BF16)
    c = torch.full((3, 80, 48), float("nan"), device=device)
    compiled = batch_kernel[(2, 1, 3)](
        a, b, c, 80, 48, 144, a.stride(0), b.stride(0), 144, 48, 64, 64, 64
    )
    assert copies(compiled) and error_of(a, b, c) < 1e-6


@triton.jit(do_not_specialize=["spans"])
def span_kernel(
    a_ptr, b_ptr, c_ptr, starts_ptr, M, K, spans, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """C = A (sum of spans of B's rows): A's tile stays, spans begin where a table says."""
    rm, rn, rk = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for span in tl.range(0, spans):
        a = tl.load(a_ptr + rm[:, None] * K + rk[None, :], mask=rm[:, None] < M, other=0.0)
        start = tl.load(starts_ptr + span)
        b = tl.load(b_ptr + (start + rk)[:, None] * BN + rn[None, :])
        acc = tl.dot(a, b, acc)
    mask = rm[:, None] < M
    tl.store(c_ptr + rm[:, None] * BN + rn[None, :], acc, mask=mask)


@pytest.mark.parametrize("spans", [0, 1, 5])
def test_a_tile_that_stays_beside_copies_by_threads(device, spans):
    a = torch.randn(80, 64, device=device).to(BF16)
    b = torch.randn(256, 64, device=device).to(BF16)
    starts = torch.tensor([7, 100, 0, 192, 33][:spans] or [0], dtype=torch.int32, device=device)
    c = torch.full((80, 64), float("nan"), device=device)
    compiled = span_kernel[(2,)](a, b, c, starts, 80, 64, spans, 64, 64, 64)
    parts = [b[s : s + 64].double() for s in starts[:spans].tolist()]
    summed = sum(parts, torch.zeros(64, 64, dtype=torch.float64, device=device))
    assert copies(compiled) == 1 and "cp.async.cg" in compiled.asm["ptx"]
    assert (c.double() - a.double() @ summed).abs().max() < 1e-3


@triton.jit
def descriptor_kernel(a, b, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    i, j = tl.program_id(0) * BM, tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(a.load([i, k]), b.load([k, j]), acc)
    c = tl.make_tensor_descriptor(c_ptr, [M, N], [N, 1], [BM, BN])
    c.store([i, j], acc)


def test_descriptors_of_the_host(device):
    a, b, c = operands(device, 80, 112, 200, False)
    blocks = 64, 64, 64
    compiled = descriptor_kernel[(2, 2)](
        TensorDescriptor.from_tensor(a, [64, 64]), TensorDescriptor.from_tensor(b, [64, 64]), c,
        80, 112, 200, *blocks,
    )  # fmt: skip
    assert error_of(a, b, c) < 1e-6 and copies(compiled)
