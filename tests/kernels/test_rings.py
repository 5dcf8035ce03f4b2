"""With a producer: loops that share rings, lie in branches, run no iteration or read tables."""

import pytest
import torch

import minitriton as triton
from minitriton.bench.sources import attentions
from tests.kernels.test_warp_split import NAN, is_split
from tests.passes import ring_kernels

two_loops_kernel = triton.jit(ring_kernels.attention)
early_return_kernel = triton.jit(ring_kernels.early_return)
pages_kernel = triton.jit(ring_kernels.pages)
gradient_kernel = triton.jit(ring_kernels.gradient)
product_kernel = triton.jit(ring_kernels.product)
two_products_kernel = triton.jit(ring_kernels.two_products)
HOPPER = {"num_warps": 8, "num_stages": 3}

pytestmark = pytest.mark.usefixtures("hopper", "at_random")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], autouse=True)
def device(request, monkeypatch):
    """Once in the emulator, with all checks."""
    torch.manual_seed(4321)
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    monkeypatch.setenv("MINITRITON_CHECK", "all")
    return request.param


def halves(device, *shape):
    return (torch.randn(shape, device=device) / 4).half()


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(("tokens", "causal"), [(272, True), (272, False)])
def test_two_loops_over_keys(device, tokens, causal, inside):
    """The first loop has no iteration in the first program; q stays for each loop, if inside."""
    d, bn = (128, 64) if causal else (64, 128)
    q, k, v = (halves(device, 2, tokens, d) for _ in "qkv")
    out = torch.full((2, tokens, d), NAN, device=device)
    compiled = two_loops_kernel[(triton.cdiv(tokens, 128), 2)](
        q, k, v, out, tokens, 128, bn, d, inside, causal, **HOPPER
    )
    scores = q.double() @ k.double().transpose(1, 2) * 0.6931471805599453
    if causal:
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -float("inf"))
    assert is_split(compiled, not causal)
    assert (out.double() - torch.softmax(scores, 2) @ v.double()).abs().max() < 2e-3


@pytest.mark.parametrize("rows", [100, 300])
def test_programs_that_end_at_once(device, rows):
    a, b = halves(device, rows, 208), halves(device, 208, 112)
    c = torch.full((rows, 112), NAN, device=device)
    compiled = early_return_kernel[(5,)](a, b, c, rows, 112, 208, 208, 112, 128, 128, 64, **HOPPER)
    assert is_split(compiled, False)
    assert (c.double() - a.double() @ b.double()).abs().max() < 1e-3


@pytest.mark.parametrize("steps", [2, 5])
def test_a_table_of_pages(device, steps):
    a, b = halves(device, steps, 128, 128), halves(device, steps, 128, 128)
    table = torch.randint(steps, (steps,), device=device, dtype=torch.int32)
    c = torch.full((128, 128), NAN, device=device)
    compiled = pages_kernel[(1,)](a, b, c, table, steps, 128, 128, "", **HOPPER)
    expected = sum(a[i].double() @ b[int(table[i])].double() for i in range(steps))
    assert is_split(compiled) and (c.double() - expected).abs().max() < 1e-3


@pytest.mark.parametrize("kind", ["two rows", "through a table"])
def test_rows_between_products(device, kind):
    n = 304
    q, k, grad = halves(device, n, 64), halves(device, 128, 64), halves(device, n, 64)
    row = torch.randn(2 * n, device=device)
    table = torch.randperm(n, device=device).to(torch.int32)
    out = torch.full((128, 64), NAN, device=device)
    compiled = gradient_kernel[(1,)](q, k, grad, row, table, out, n, 128, 128, 64, kind, **HOPPER)
    line = row[table.long()] if kind == "through a table" else row[:n]
    p = torch.exp2(k.double() @ q.double().T - line.double())
    if kind == "two rows":
        p = p * row[n:].double()
    expected = p @ grad.double()
    assert is_split(compiled)
    assert (out.double() - expected).abs().max() < 2e-3 * expected.abs().max()


@pytest.mark.parametrize("kind", ["an end by program", "an end that falls", "an end from memory"])
def test_programs_of_different_lengths(device, kind):
    """In whatever order they run, each takes its own part of K."""
    m, n, k = 400, 112, 320
    a, b = halves(device, m, k), halves(device, k, n)
    ends = torch.tensor([0, 2, 0, 0], dtype=torch.int32, device=device)
    c = torch.full((m, n), NAN, device=device)
    compiled = product_kernel[(4, 1)](a, b, c, ends, m, n, k, k, n, 128, 128, 64, kind, **HOPPER)
    assert is_split(compiled, False)
    for program in range(4):
        steps = {"an end by program": program + 1, "an end that falls": 4 - program}.get(kind, 2)
        rows, depth = slice(128 * program, 128 * (program + 1)), 64 * steps
        expected = a[rows, :depth].double() @ b[:depth].double()
        assert (c[rows].double() - expected).abs().max() < 1e-3


def test_two_products_in_a_loop(device):
    n = 192
    a, b = halves(device, 128, n), halves(device, n, 256)
    c = torch.full((128, 256), NAN, device=device)
    compiled = two_products_kernel[(1,)](a, b, c, n, 128, 128, 128, 64, **HOPPER)
    assert is_split(compiled) and (c.double() - a.double() @ b.double()).abs().max() < 1e-3


def gradients_of_attention(device, tokens, d, group, causal, keys, queries):
    """The two kernels, after a comparison of what they give; keys and queries: their (BLOCK_M,
    BLOCK_N, num_warps, num_stages)."""
    heads, scale = 2, d**-0.5
    q, grad = (halves(device, 1, tokens, heads, d) for _ in "qg")
    k, v = (halves(device, 1, tokens, heads // group, d) for _ in "kv")
    wide = [x.double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    scores = wide[0] @ wide[1].repeat_interleave(group, 1).transpose(2, 3) * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -float("inf"))
    out = torch.softmax(scores, 3) @ wide[2].repeat_interleave(group, 1)
    expected = torch.autograd.grad(out, wide, grad.double().transpose(1, 2))
    lse = torch.logsumexp(scores, 3).mul(1 / 0.6931471805599453).float()
    delta = (out * grad.double().transpose(1, 2)).sum(3).float()
    dq, dk, dv = (torch.full_like(x, NAN) for x in (q, k, v))
    shared = (q, k, v, grad, lse.contiguous(), delta.contiguous())
    rest = (scale, heads, tokens, *q.stride()[:3], *k.stride()[:3], d)
    kernels = (
        (attentions.attention_keys_kernel, (dk, dv), keys, (tokens // keys[1], heads // group)),
        (attentions.attention_queries_kernel, (dq,), queries, (tokens // queries[0], heads)),
    )
    made = [
        kernel[grid](
            *shared, *results, *rest, *blocks[:2], group, causal, num_warps=blocks[2],
            num_stages=blocks[3],
        )
        for kernel, results, blocks, grid in kernels
    ]  # fmt: skip
    for mine, right in zip((dq, dk, dv), expected, strict=True):
        error = (mine.double() - right.transpose(1, 2)).norm() / right.norm()
        assert error < 2e-3
    return made


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_gradients_of_attention_from_plain_source(device, causal, group):
    """Keys and values, loaded before loops in a loop, are copied once for each of these."""
    keys, queries = (64, 128, 8, 3), (128, 128, 8, 2)
    made = gradients_of_attention(device, 256, 128, group, causal, keys, queries)
    assert all(is_split(kernel, kernel.persistent) for kernel in made)
