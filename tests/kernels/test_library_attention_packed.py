"""Attention of queries, keys and values side by side: as `attention`, with one gradient."""

import pytest
import torch

from minitriton.kernels.attention import attention
from minitriton.kernels.attention_packed import packed_attention, packed_attention_reference
from minitriton.kernels.checks import KernelArgumentError

BOUNDS = {torch.float32: (1e-5, 2e-5), torch.bfloat16: (4e-3, 6e-3), torch.float16: (1e-3, 1e-3)}


def relative(out, expected):
    return ((out.double() - expected).norm() / expected.norm()).item()


def make(batch, tokens, heads, width, dtype, device):
    x = torch.randn(batch, tokens, 3 * heads * width, device=device).to(dtype)
    return x.requires_grad_()


@pytest.mark.parametrize(
    ("shape", "dtype", "causal", "dropout"),
    [
        ((2, 70, 3, 64), torch.bfloat16, True, 0.2),
        ((2, 33, 2, 32), torch.float32, True, 0.2),
        ((1, 17, 2, 24), torch.float16, False, 0.0),
        ((1, 20, 1, 48), torch.float32, True, 0.0),  # two tiles of channels
        ((1, 9, 3, 5), torch.bfloat16, True, 0.0),  # rows that copies of 16 bytes cannot read
    ],
    ids=str,
)
def test_output_and_gradient(device, shape, dtype, causal, dropout):
    batch, tokens, heads, width = shape
    qkv = make(*shape, dtype, device)
    seed = torch.tensor([7], device=device)
    options = {"causal": causal, "dropout": dropout, "seed": seed}
    out = packed_attention(qkv, heads, **options)
    grad = torch.randn(out.shape, device=device).to(dtype)
    (ours,) = torch.autograd.grad(out, qkv, grad)

    exact = qkv.detach().double().requires_grad_()
    expected = packed_attention_reference(exact, heads, **options)
    (wanted,) = torch.autograd.grad(expected, exact, grad.double())
    assert out.shape == (batch, tokens, heads * width) and out.dtype == ours.dtype == dtype
    assert ours.is_contiguous() and relative(out, expected) < BOUNDS[dtype][0]
    for mine, theirs in zip(ours.chunk(3, 2), wanted.chunk(3, 2), strict=True):
        assert relative(mine, theirs) < BOUNDS[dtype][1]

    q, k, v = qkv.detach().view(batch, tokens, 3, heads, width).unbind(2)
    leaves = [x.contiguous().requires_grad_() for x in (q, k, v)]
    apart = attention(*leaves, **options)
    assert torch.equal(apart.flatten(2), out)
    parts = torch.autograd.grad(apart, leaves, grad.view(apart.shape))
    assert torch.equal(torch.stack(parts, 2).flatten(2), ours)  # bit by bit


def test_strided_input_and_gradient(device):
    wide = torch.randn(2, 19, 2 * 96 + 8, device=device)
    qkv = wide[:, :, 8 : 8 + 96].requires_grad_()
    out = packed_attention(qkv, 2)
    grad = torch.randn(2, 19, 64, device=device)[:, :, ::2]
    (ours,) = torch.autograd.grad(out, qkv, grad)
    dense = qkv.detach().contiguous().requires_grad_()
    again = packed_attention(dense, 2)
    (theirs,) = torch.autograd.grad(again, dense, grad.contiguous())
    assert torch.equal(out, again) and torch.equal(ours, theirs)


@pytest.mark.parametrize("shape", [(0, 5, 2, 16), (2, 0, 2, 16)])
def test_nothing_to_attend_to(device, shape):
    qkv = make(*shape, torch.float32, device)
    out = packed_attention(qkv, shape[2])
    (grad,) = torch.autograd.grad(out.sum(), qkv)
    assert out.shape == (*shape[:2], 32) and grad.shape == qkv.shape


def test_operator(device):
    qkv = make(1, 8, 2, 16, torch.float32, device)
    seed = torch.tensor([3], device=device)
    torch.library.opcheck(
        torch.ops.minitriton.packed_attention, (qkv, 2, seed, True, 0.3, "tf32x3")
    )
    compiled = torch.compile(packed_attention, fullgraph=True, backend="aot_eager")
    (ours,) = torch.autograd.grad(compiled(qkv, 2).sum(), qkv)
    (theirs,) = torch.autograd.grad(packed_attention(qkv, 2).sum(), qkv)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((torch.ones(2, 3, 20), 2), {}, r"'qkv': shape \(2, 3, 20\); 2 heads need \[B, T, 6 D\]"),
        ((torch.ones(3, 12), 2), {}, r"'qkv': shape \(3, 12\)"),
        ((torch.ones(2, 3, 0), 2), {}, r"'qkv': shape \(2, 3, 0\)"),
        ((torch.ones(1, 1, 3 * 257), 1), {}, "'qkv': 257 channels per head; 1 to 256"),
        ((torch.ones(1, 1, 3).double(), 1), {}, "'qkv': dtype torch.float64"),
        ((None, 1), {}, "'qkv': expected a tensor"),
        ((torch.ones(1, 1, 12), 0), {}, "'heads': must be a whole number from 1"),
        ((torch.ones(1, 1, 12), 2.0), {}, "'heads': must be a whole number"),
        ((torch.ones(1, 1, 12), 2), {"dropout": 1.0}, "'dropout': must be in"),
        ((torch.ones(1, 1, 12), 2), {"dropout": 0.1}, "'seed': None; dropout needs"),
        ((torch.ones(1, 1, 12), 2), {"precision": "fp8"}, "'precision': 'fp8'"),
        ((torch.ones(1, 1, 12), 2), {"causal": 1}, "'causal': must be True or False"),
    ],
)
def test_refused_arguments(arguments, options, words):
    with pytest.raises(KernelArgumentError, match=f"argument {words}"):
        packed_attention(*arguments, **options)
