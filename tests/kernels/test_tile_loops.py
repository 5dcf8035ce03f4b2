"""Kernels whose source is persistent: the benchmarks', Triton's tutorial 09, tiles in order."""

import pytest
import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.bench.sources.products import descriptor_matmul_kernel
from minitriton.tools.tensor_descriptor import TensorDescriptor
from tests.kernels.test_tma import BF16
from tests.kernels.test_warp_split import NAN, is_split, once, only_gpu

pytestmark = pytest.mark.usefixtures("hopper")
FP8 = torch.float8_e4m3fn


def plays(compiled):
    """Whether two groups of warps take tiles in turns."""
    return is_split(compiled, False) and compiled.metadata.get("consumer_groups") == 2


def is_as_planned(compiled, warps):
    assert ("persistent" in compiled.metadata) is False
    return plays(compiled) if warps == 4 else is_split(compiled, False) and not plays(compiled)


def matrices(device, m, n, k, dtype=BF16):
    """A [m, k] and B [n, k], and C to be; rows are longer than they look."""
    wide_n, wide_k = -(-n // 16) * 16, -(-k // 16) * 16
    a, b = (torch.randn(rows, wide_k, device=device).to(dtype)[:, :k] for rows in (m, n))
    return a, b, torch.full((m, wide_n), NAN, device=device, dtype=BF16)[:, :n]


def error(a, b, c):
    expected = a.double() @ b.double().T
    return ((c.double() - expected).norm() / expected.norm()).item()


def described(a, b, c, programs, blocks, halves=False, warps=4, stages=3):
    bm, bn, bk = blocks
    (m, k), n = a.shape, b.shape[0]
    describe = TensorDescriptor.from_tensor
    return descriptor_matmul_kernel[(programs,)](
        describe(a, [bm, bk]), describe(b, [bn, bk]), describe(c, [bm, bn // 2 if halves else bn]),
        m, n, k, *blocks, 2, True, halves, programs, num_warps=warps, num_stages=stages,
    )  # fmt: skip


SHAPES = [((128, 128, 64), 1), ((259, 300, 200), 2), ((131, 600, 330), 1), ((300, 77, 131), 5)]


@pytest.mark.parametrize(("shape", "programs"), SHAPES, ids=str)
@pytest.mark.parametrize("warps", [4, 8])
def test_descriptors(device, shape, programs, warps):
    """1, 9, 10 and 3 tiles; fewer than programs, and odd numbers in one."""
    tensors = matrices(device, *shape)
    compiled = described(*tensors, programs, (128, 128, 64), warps=warps)
    assert is_as_planned(compiled, warps) and error(*tensors) < 3e-3


@once
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("stages", [2, 4])
def test_descriptors_that_land_at_random(device, at_random, stages, halves):
    tensors = matrices(device, 259, 300, 203)
    compiled = described(*tensors, 2, (128, 128, 64), halves, stages=stages)
    assert plays(compiled) and error(*tensors) < 3e-3


@once
@pytest.mark.parametrize("stages", [3, 4])
def test_the_tile_of_the_benchmarks_in_halves(device, at_random, stages):
    tensors = matrices(device, 259, 304, 203)
    compiled = described(*tensors, 1, (128, 256, 64), True, 8, stages)
    assert is_as_planned(compiled, 8) and error(*tensors) < 3e-3
    waits = compiled.ptx.count("cp.async.bulk.wait_group 0")
    assert waits == 1  # of the first half, for the tile before


@once
@pytest.mark.parametrize(("blocks", "warps"), [((128, 128, 128), 4), ((128, 256, 128), 8)])
def test_bytes(device, at_random, blocks, warps):
    tensors = matrices(device, 259, 300, 400, FP8)
    compiled = described(*tensors, 2, blocks, warps == 8, warps)
    assert is_as_planned(compiled, warps) and error(*tensors) < 3e-3


def test_no_depth(device):
    a, b, c = matrices(device, 300, 200, 64)
    describe = TensorDescriptor.from_tensor
    arguments = (describe(a, [128, 64]), describe(b, [128, 64]), describe(c, [128, 128]), 300, 200)
    options = {"num_warps": 4, "num_stages": 3}
    rest = (128, 128, 64, 2, True, False, 2)
    assert plays(descriptor_matmul_kernel[(2,)](*arguments, 0, *rest, **options))
    assert not c.any()
    descriptor_matmul_kernel[(2,)](*arguments[:3], 0, 0, 64, *rest, **options)  # no tiles
    assert not c.any()
    assert plays(descriptor_matmul_kernel[(2,)](*arguments, 64, *rest, **options))
    assert error(a, b, c) < 3e-3


@triton.jit
def compute_pid(tile_id, num_pid_in_group, num_pid_m, GROUP_SIZE_M: tl.constexpr):
    group_id = tile_id // num_pid_in_group
    first_pid_m = group_id * GROUP_SIZE_M
    group_size_m = min(num_pid_m - first_pid_m, GROUP_SIZE_M)
    pid_m = first_pid_m + (tile_id % group_size_m)
    pid_n = (tile_id % num_pid_in_group) // group_size_m
    return pid_m, pid_n


@triton.jit
def pointer_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    NUM_SMS: tl.constexpr,
):  # fmt: skip
    """As in the tutorial: pointers, rows past the end moved to the first, a counter for stores."""
    start = tl.program_id(0)
    num_m, num_n, steps = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K)
    tile_id_c = start - NUM_SMS
    offs_k_for_mask = tl.arange(0, BLOCK_K)
    in_group = GROUP_M * num_n
    for tile_id in tl.range(start, num_m * num_n, NUM_SMS, flatten=True):
        pid_m, pid_n = compute_pid(tile_id, in_group, num_m, GROUP_M)
        offs_am = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_bn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        offs_am = tl.where(offs_am < M, offs_am, 0)
        offs_bn = tl.where(offs_bn < N, offs_bn, 0)
        offs_am = tl.max_contiguous(tl.multiple_of(offs_am, BLOCK_M), BLOCK_M)
        offs_bn = tl.max_contiguous(tl.multiple_of(offs_bn, BLOCK_N), BLOCK_N)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for ki in range(steps):
            offs_k = ki * BLOCK_K + tl.arange(0, BLOCK_K)
            a_ptrs = a_ptr + (offs_am[:, None] * stride_am + offs_k[None, :] * stride_ak)
            b_ptrs = b_ptr + (offs_k[:, None] * stride_bk + offs_bn[None, :] * stride_bn)
            a = tl.load(a_ptrs, mask=offs_k_for_mask[None, :] < K - ki * BLOCK_K, other=0.0)
            b = tl.load(b_ptrs, mask=offs_k_for_mask[:, None] < K - ki * BLOCK_K, other=0.0)
            total = tl.dot(a, b, total)
        tile_id_c += NUM_SMS
        pid_m, pid_n = compute_pid(tile_id_c, in_group, num_m, GROUP_M)
        offs_cm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_cn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        c_ptrs = c_ptr + stride_cm * offs_cm[:, None] + stride_cn * offs_cn[None, :]
        mask = (offs_cm[:, None] < M) & (offs_cn[None, :] < N)
        tl.store(c_ptrs, total.to(c_ptr.dtype.element_ty), mask=mask)


@triton.jit
def device_descriptor_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SUBTILE: tl.constexpr, NUM_SMS: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """As in the tutorial: descriptors that the kernel makes."""
    start = tl.program_id(0)
    num_m, num_n, steps = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K)
    a_desc = tl.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
    b_desc = tl.make_tensor_descriptor(b_ptr, [N, K], [K, 1], [BLOCK_N, BLOCK_K])
    c_desc = tl.make_tensor_descriptor(
        c_ptr, [M, N], [N, 1], [BLOCK_M, BLOCK_N // 2 if SUBTILE else BLOCK_N]
    )
    tile_id_c = start - NUM_SMS
    in_group = GROUP_M * num_n
    for tile_id in tl.range(
        start, num_m * num_n, NUM_SMS, flatten=not WARP_SPECIALIZE, warp_specialize=WARP_SPECIALIZE
    ):
        pid_m, pid_n = compute_pid(tile_id, in_group, num_m, GROUP_M)
        offs_am, offs_bn = pid_m * BLOCK_M, pid_n * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for ki in range(steps):
            a = a_desc.load([offs_am, ki * BLOCK_K])
            b = b_desc.load([offs_bn, ki * BLOCK_K])
            total = tl.dot(a, b.T, total)
        tile_id_c += NUM_SMS
        pid_m, pid_n = compute_pid(tile_id_c, in_group, num_m, GROUP_M)
        m, n = pid_m * BLOCK_M, pid_n * BLOCK_N
        if SUBTILE:
            pairs = tl.permute(tl.reshape(total, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
            left, right = tl.split(pairs)
            c_desc.store([m, n], left.to(c_ptr.dtype.element_ty))
            c_desc.store([m, n + BLOCK_N // 2], right.to(c_ptr.dtype.element_ty))
        else:
            c_desc.store([m, n], total.to(c_ptr.dtype.element_ty))


def by_pointers(a, b, c, programs, blocks, warps):
    (m, k), n = a.shape, b.shape[0]
    return pointer_kernel[(programs,)](
        a, b, c, m, n, k, *a.stride(), *b.T.stride(), *c.stride(), *blocks, 2, programs,
        num_warps=warps, num_stages=3,
    )  # fmt: skip


@once
@pytest.mark.parametrize(("warps", "blocks"), [(4, (128, 128, 64)), (8, (128, 256, 64))])
@pytest.mark.parametrize("programs", [1, 2])
def test_pointers_and_a_counter(device, at_random, programs, warps, blocks):
    tensors = matrices(device, 259, 304, 208)
    compiled = by_pointers(*tensors, programs, blocks, warps)
    assert is_as_planned(compiled, warps) and error(*tensors) < 3e-3
    assert "store by TMA" in str(compiled.metadata["remarks"])


@once
@pytest.mark.parametrize("subtile", [False, True])
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize(("warps", "blocks"), [(4, (128, 128, 64)), (8, (128, 256, 64))])
def test_descriptors_of_the_kernel(device, at_random, warps, blocks, asked, subtile):
    a, b, c = tensors = matrices(device, 272, 304, 208)
    compiled = device_descriptor_kernel[(2,)](
        a, b, c, 272, 304, 208, *blocks, 2, subtile, 2, asked, num_warps=warps, num_stages=3
    )
    assert is_as_planned(compiled, warps) and error(*tensors) < 3e-3


@triton.jit
def in_order_kernel(
    a_ptr, b_ptr, c_ptr, seen_ptr, tiles, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STORED: tl.constexpr,
):  # fmt: skip
    """All tiles of rows go to the same place. STORED: the last one wins; else each is added to
    half of what was there, and counted."""
    rm, rn, rk = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    at = c_ptr + rm[:, None] * BN + rn[None, :]
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        total = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            a = tl.load(a_ptr + (tile * BM + rm)[:, None] * K + (k + rk)[None, :])
            b = tl.load(b_ptr + (k + rk)[:, None] * BN + rn[None, :])
            total = tl.dot(a, b, total)
        if not STORED:
            total += tl.load(at).to(tl.float32) * 0.5
            tl.store(seen_ptr, tl.load(seen_ptr) * 3 + tile)
        tl.store(at, total.to(c_ptr.dtype.element_ty))


@once
@pytest.mark.parametrize("tiles", [1, 2, 5, 6])
@pytest.mark.parametrize("stored", [True, False])
def test_tiles_end_in_order(device, at_random, tiles, stored):
    """Also where the next one has been multiplied before."""
    a, b = (torch.randn(shape, device=device).to(BF16) for shape in ((tiles * 64, 384), (384, 128)))
    c = torch.zeros(64, 128, device=device, dtype=BF16 if stored else torch.float32)
    seen = torch.ones(1, device=device, dtype=torch.int32)
    compiled = in_order_kernel[(1,)](
        a, b, c, seen, tiles, 384, 64, 128, 128, stored, num_warps=4, num_stages=2
    )
    assert plays(compiled)
    products = (a.double() @ b.double()).reshape(tiles, 64, 128)
    expected, number = torch.zeros_like(products[0]), 1
    for tile in range(tiles):
        expected = products[tile] + (0 if stored else expected / 2)
        number = number * 3 + tile
    assert ((c.double() - expected).norm() / expected.norm()).item() < 3e-3
    assert stored or seen.item() == number


@only_gpu
@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize("case", ["descriptors", "halves", "pointers", "bytes"])
def test_runs_are_bitwise_equal(device, case, warps):
    """A race would show as a run that differs."""
    blocks = (128, 128 if warps == 4 else 256, 128 if case == "bytes" else 64)
    a, b, c = matrices(device, 4096, 4096, 320, FP8 if case == "bytes" else BF16)

    def run():
        c.fill_(NAN)
        if case == "pointers":
            return by_pointers(a, b, c, 132, blocks, warps)
        return described(a, b, c, 132, blocks, case == "halves", warps, 3)

    assert is_as_planned(run(), warps) and error(a, b, c) < 3e-3
    first = c.clone()
    for _ in range(600):
        run()
        assert torch.equal(c, first)
