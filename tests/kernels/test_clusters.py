"""Kernels launched with num_ctas=2: bit for bit what they are without, on odd and even grids."""

import pytest
import torch

import minitriton as triton
import minitriton.language as tl
from minitriton import execute
from minitriton.tools.tensor_descriptor import TensorDescriptor
from tests.codegen.split_kernels import attention_kernel, matmul_kernel
from tests.kernels.test_tma import BF16, batch_kernel, descriptor_kernel, error_of
from tests.kernels.test_warp_split import NAN, heads, once, only_gpu, operands

pytestmark = pytest.mark.usefixtures("hopper")


@pytest.fixture(params=[2, 4])
def ctas(request, monkeypatch):
    """So many CTAs for all programs, in the emulator: one cluster, or two."""
    monkeypatch.setattr(execute, "EMULATED_CTAS", request.param)


def is_paired(compiled):
    return compiled.shape.clusters == 2 and compiled.metadata.get("producer_warps") == 4


def product(a, b, blocks, num_warps, num_ctas, group=2, num_stages=3):
    """The kernel and its result."""
    (m, k), n = a.shape, b.shape[1]
    c = torch.full((m, n), NAN, device=a.device, dtype=a.dtype)
    tiles = triton.cdiv(m, blocks[0]) * triton.cdiv(n, blocks[1])
    compiled = matmul_kernel[(tiles,)](
        a, b, c, m, n, k, *a.stride(), *b.stride(), *c.stride(), *blocks, group,
        num_warps=num_warps, num_stages=num_stages, num_ctas=num_ctas,
    )  # fmt: skip
    return compiled, c


def check(a, b, *how, paired=True, **options):
    """Clusters change no bit."""
    _, single = product(a, b, *how, 1, **options)
    compiled, c = product(a, b, *how, 2, **options)
    assert is_paired(compiled)
    if a.device.type == "cpu":  # what was emulated
        assert (compiled.report is compiled.without_clusters().report) != paired
    assert torch.equal(c, single) and error_of(a, b, c) < 1e-3


TILES = [((128, 256, 64), 8), ((128, 192, 64), 8), ((256, 128, 64), 8), ((128, 128, 64), 4),
         ((128, 192, 64), 4)]  # fmt: skip


@pytest.mark.parametrize(("blocks", "warps"), TILES, ids=str)
@pytest.mark.parametrize("b_t", [False, True])
def test_products(device, blocks, warps, b_t):
    """Of four programs; both kinds of groups."""
    a, b, _ = operands(device, 2 * blocks[0] - 9, 2 * blocks[1] - 16, 203, b_t)
    check(a, b, blocks, warps)


@once
@pytest.mark.parametrize(("blocks", "warps"), [((128, 128, 64), 8), ((128, 128, 64), 4)], ids=str)
@pytest.mark.parametrize(("tiles", "group"), [((3, 2), 1), ((3, 4), 3), ((5, 2), 2), ((1, 6), 4)])
def test_neighbours_of_all_kinds(device, at_random, ctas, blocks, warps, tiles, group):
    """Side by side along either dimension of the tiles, or in another group of rows."""
    a, b, _ = operands(device, tiles[0] * 128 - 3, tiles[1] * 128 - 48, 203, False)
    check(a, b, blocks, warps, group=group)


@pytest.mark.parametrize("warps", [8, 4])
@pytest.mark.parametrize("tiles", [(1, 1), (3, 1), (3, 3)])
def test_odd_numbers_of_programs(device, warps, tiles):
    """They run the form without clusters; the next launch does not."""
    for rows in (tiles[0], tiles[0] + tiles[0] % 2):
        a, b, _ = operands(device, rows * 128 - 9, tiles[1] * 128, 131, False)
        paired = rows * tiles[1] % 2 == 0
        check(a, b, (128, 128, 64), warps, paired=paired)


def test_no_depth(device):
    """No tensor map describes it: the form without TMA, and without clusters."""
    a, b, c = operands(device, 256, 256, 64, False)
    scalars = (256, 256, 0, *a.stride(), *b.stride(), *c.stride(), 128, 128, 64, 2)
    compiled = matmul_kernel[(4,)](a, b, c, *scalars, num_warps=8, num_ctas=2)
    assert is_paired(compiled) and not compiled.without_tma().shape.clusters > 1
    assert not c.any()
    check(a, b, (128, 128, 64), 8)


@pytest.mark.parametrize("warps", [8, 4])
@pytest.mark.parametrize("shape", [(300, 250), (250, 300)])
def test_grids_of_two_dimensions(device, warps, shape):
    """Of 3 x 2 and 2 x 3 programs; tensor descriptors."""
    m, n, k = *shape, 200
    a = torch.randn(m, 208, device=device).to(BF16)[:, :k]
    b = torch.randn(k, 304, device=device).to(BF16)[:, :n]
    results = []
    for num_ctas in (1, 2):
        c = torch.full((m, 304), NAN, device=device)
        compiled = descriptor_kernel[(triton.cdiv(m, 128), triton.cdiv(n, 128))](
            TensorDescriptor.from_tensor(a, [128, 64]), TensorDescriptor.from_tensor(b, [64, 128]),
            c, m, 304, k, 128, 128, 64, num_warps=warps, num_ctas=num_ctas,
        )  # fmt: skip
        results.append(c[:, :n])
    assert is_paired(compiled) and torch.equal(*results)
    assert error_of(a, b, results[1]) < 1e-6


@once
def test_batches_along_the_third_axis(device, at_random, ctas):
    """Pairs within a batch, and of two batches: these share nothing."""
    a = torch.randn(2, 272, 208, device=device).to(BF16)
    b = torch.randn(2, 208, 112, device=device).to(BF16)
    results = []
    for num_ctas in (1, 2):
        c = torch.full((2, 272, 112), NAN, device=device)
        compiled = batch_kernel[(3, 1, 2)](
            a, b, c, 272, 112, 208, a.stride(0), b.stride(0), 208, 112, 128, 128, 64,
            num_warps=8, num_ctas=num_ctas,
        )  # fmt: skip
        results.append(c)
    assert is_paired(compiled) and torch.equal(*results) and error_of(a, b, results[1]) < 1e-6


@once
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(("tokens", "count"), [(250, 1), (300, 2), (256, 2)])
def test_attention(device, at_random, ctas, d, tokens, count):
    """Neighbours share keys and values of one head; those of two heads share nothing; queries are
    each program's own."""
    q, k, v, _ = heads(device, tokens, d, count)
    results = []
    for num_ctas in (1, 2):
        out = torch.full_like(q, NAN)
        compiled = attention_kernel[(triton.cdiv(tokens, 128), count)](
            q, k, v, out, d**-0.5, tokens, d, 128, 64, False, num_warps=8, num_stages=2,
            num_ctas=num_ctas, warp_specialize=True,
        )  # fmt: skip
        results.append(out)
    scores = q.double() @ k.double().mT * d**-0.5 * torch.log(torch.tensor(2.0)).item()
    expected = torch.softmax(scores, -1) @ v.double()
    assert is_paired(compiled) and torch.equal(*results)
    assert ((results[1].double() - expected).norm() / expected.norm()).item() < 1e-2


def test_causal_attention_has_programs_of_different_lengths(device):
    q, k, v, out = heads(device, 256, 64, 1)
    compiled = attention_kernel[(2, 1)](
        q, k, v, out, 0.1, 256, 64, 128, 64, True, num_warps=8, num_stages=2, num_ctas=2,
        warp_specialize=True,
    )  # fmt: skip
    assert compiled.shape.clusters == 1 and not out.isnan().any()
    assert "num_ctas 2 reduced to 1: programs may differ in length" in str(compiled.metadata)


@triton.jit
def experts_kernel(
    x_ptr, w_ptr, expert_ptr, out_ptr, K, rows, N: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr
):
    """Rows times the matrix of their expert, which a table names for each tile of rows; rows: of
    all matrices."""
    pid = tl.program_id(0)
    expert = tl.load(expert_ptr + pid)
    rm, rn, rk = pid * BM + tl.arange(0, BM), tl.arange(0, N), tl.arange(0, BK)
    acc = tl.zeros((BM, N), tl.float32)
    for k in range(0, K, BK):
        x = tl.load(x_ptr + rm[:, None] * K + (k + rk)[None, :])
        at = (expert * K + k + rk)[:, None]
        w = tl.load(w_ptr + at * N + rn[None, :], mask=(at >= 0) & (at < rows), other=0.0)
        acc = tl.dot(x, w, acc)
    tl.store(out_ptr + rm[:, None] * N + rn[None, :], acc)


def of_experts(kernel, device, experts, **options):
    """The kernel and its error, for so many tiles of rows."""
    table = torch.tensor(experts, dtype=torch.int32, device=device)
    tiles, count = len(experts), max(experts) + 1
    x = torch.randn(tiles, 128, 192, device=device).to(BF16)
    w = torch.randn(count, 192, 128, device=device).to(BF16)
    out = torch.full((tiles, 128, 128), NAN, device=device)
    sizes = (192, count * 192, 128, 128, 64)
    compiled = kernel[(tiles,)](x, w, table, out, *sizes, warp_specialize=True, **options)
    expected = x.double() @ w[table.long()].double()
    return compiled, ((out - expected).norm() / expected.norm()).item()


@once
@pytest.mark.parametrize("warps", [8, 4])
def test_places_from_a_table(device, at_random, ctas, warps):
    """Only where both programs of a pair have the same expert do they share its matrix."""
    experts, options = [1, 1, 0, 2, 2, 2, 1, 0], {"num_warps": warps, "num_stages": 2}
    compiled, error = of_experts(experts_kernel, device, experts, num_ctas=2, **options)
    assert is_paired(compiled) and error < 1e-6


def test_configurations(device):
    """In the emulator the first one that compiles is taken."""
    configs = [triton.Config({}, num_warps=8, num_ctas=n) for n in (2, 1)]
    tuned = triton.autotune(configs, key=[])(triton.jit(experts_kernel.fn))
    compiled, error = of_experts(tuned, device, [0, 0])
    assert error < 1e-6 and (device == "cuda" or is_paired(compiled))


@only_gpu
@pytest.mark.parametrize(("blocks", "warps"), TILES, ids=str)
def test_runs_are_bitwise_equal(device, blocks, warps):
    """A race would show as a run that differs, a lost arrival as a hang."""
    a, b, _ = operands(device, 4096, 4096, 512, False)
    _, first = product(a, b, blocks, warps, 2, group=8)
    for _ in range(300):
        assert torch.equal(product(a, b, blocks, warps, 2, group=8)[1], first)
