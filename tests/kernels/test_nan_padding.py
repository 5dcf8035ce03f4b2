"""Operands of products that are NaN outside their arrays, copied by TMA on Hopper GPUs."""

import pytest
import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.tools.tensor_descriptor import TensorDescriptor

pytestmark = pytest.mark.usefixtures("hopper")
NAN = float("nan")


@triton.jit
def product_kernel(
    a_ptr, a_desc, b_ptr, c_ptr, M, N, K, stride_a, FORM: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """a [M, K] times b [N, K] transposed into c of whole tiles; K of whole tiles, too."""
    first = tl.program_id(0) * BM
    rm, rn, rk = first + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    made = tl.make_tensor_descriptor(a_ptr, [M, K], [stride_a, 1], [BM, BK], padding_option="nan")
    block = tl.make_block_ptr(a_ptr, (M, K), (stride_a, 1), (first, 0), (BM, BK), (1, 0))
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        if FORM == "mask":
            a_ptrs = a_ptr + rm[:, None] * stride_a + (k + rk)[None, :]
            a = tl.load(a_ptrs, mask=rm[:, None] < M, other=float("nan"))
        elif FORM == "block pointer":
            a = tl.load(block, boundary_check=(0, 1), padding_option="nan")
            block = tl.advance(block, (0, BK))
        elif FORM == "descriptor":
            a = made.load([first, k])
        else:
            a = a_desc.load([first, k])
        b_ptrs = b_ptr + rn[None, :] * K + (k + rk)[:, None]
        acc = tl.dot(a, tl.load(b_ptrs, mask=rn[None, :] < N, other=0.0), acc)
    tl.store(c_ptr + rm[:, None] * BN + rn[None, :], acc)


def run(device, form, dtype, blocks, m, k, **options):
    """The compiled kernel; its result has been checked."""
    bm, bn, bk = blocks
    n = bn - 5
    a = torch.randn(m + 3, k + 16, device=device).to(dtype)[:m, :k]  # with numbers behind it
    b = torch.randn(n, k, device=device).to(dtype)
    desc = TensorDescriptor.from_tensor(a, [bm, bk], padding="nan")
    tiles = triton.cdiv(m, bm)
    c = torch.zeros(tiles * bm, bn, device=device)
    compiled = product_kernel[(tiles,)](
        a, desc, b, c, m, n, k, a.stride(0), form, *blocks, num_stages=3, **options
    )
    expected, scale = a.double() @ b.double().T, a.double().abs() @ b.double().abs().T
    assert c[m:, :n].isnan().all() and c[:m].isfinite().all() and not c[:m, n:].any()
    assert ((c[:m, :n] - expected).abs() <= 1e-3 * scale).all()
    return compiled


def is_by_tma(compiled):
    ptx = compiled.asm["ptx"]
    return "cp.async.bulk.tensor" in ptx and "not pipelined" not in str(compiled.metadata)


FORMS = ("mask", "block pointer", "descriptor", "descriptor of the host")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("m", [24, 64, 72])
def test_forms(device, form, m):
    assert is_by_tma(run(device, form, torch.float16, (64, 64, 32), m, 96, num_warps=4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("form", FORMS[:2])
def test_types(device, dtype, form):
    """fp32 is rounded to tf32 on the way, NaN too."""
    assert is_by_tma(run(device, form, dtype, (64, 64, 32), 40, 96, num_warps=4))


@pytest.mark.parametrize("form", ["mask", "descriptor of the host"])
def test_producer_warps(device, form):
    compiled = run(device, form, torch.float16, (128, 128, 64), 200, 192, num_warps=8)
    assert is_by_tma(compiled) and "setmaxnreg" in compiled.asm["ptx"]


@pytest.mark.parametrize("form", FORMS[:3])
def test_without_tma(device, monkeypatch, form):
    """A size that no other test has: a launcher of the GPU asks the environment once."""
    monkeypatch.setenv("MINITRITON_TMA", "0")
    compiled = run(device, form, torch.float16, (64, 32, 32), 24, 96, num_warps=4)
    assert "only TMA fills with NaN" in str(compiled.metadata["remarks"])


def test_a_launch_that_no_map_describes(device):
    """No rows: a map has none, so that the kernel without TMA runs."""
    a = torch.randn(4, 96, device=device).half()
    b = torch.randn(64, 96, device=device).half()
    c = torch.zeros(64, 64, device=device)
    desc = TensorDescriptor.from_tensor(a, [64, 32], padding="nan")
    compiled = product_kernel[(1,)](a, desc, b, c, 0, 64, 96, 96, "mask", 64, 64, 32, num_stages=3)
    assert is_by_tma(compiled) and c.isnan().all()
