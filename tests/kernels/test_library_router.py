"""The router against its definition: choices and rows exactly, numbers against fp64."""

import pytest
import torch

from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.moe_router import Routing, moe_route, moe_route_reference, padded_rows

# relative rms: weights, gradient of the logits
BOUNDS = {
    torch.float32: (1e-6, 1e-5),
    torch.bfloat16: (1e-6, 8e-3),
    torch.float16: (1e-6, 2e-3),
}


def relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    return ((out.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def separated(tokens, experts, dtype, device):
    """Logits and a bias of zeros and ones: no two s + bias of a token are closer than 1e-4."""
    half = torch.arange(0x3D80, 0x3D80 + (experts + 1) // 2, dtype=torch.int16)
    values = torch.cat([half.view(torch.bfloat16), -half.view(torch.bfloat16)])[:experts]
    order = torch.rand(tokens, experts).argsort(-1)
    bias = (torch.rand(experts) < 8 / experts).float()
    return values[order].to(device, dtype).requires_grad_(), bias.to(device)


def same_rows(out: Routing, expected: Routing) -> None:
    for name in Routing._fields:
        ours, theirs = getattr(out, name), getattr(expected, name)
        assert ours.shape == theirs.shape and ours.is_contiguous(), name
        if theirs.dtype == torch.int32:
            assert torch.equal(ours, theirs), name


@pytest.mark.parametrize(
    ("tokens", "experts", "topk", "tile_rows", "dtype"),
    [
        (33, 14, 3, 16, torch.bfloat16), (5, 896, 16, 64, torch.float32),
        (5, 896, 16, 64, torch.bfloat16), (2, 1024, 32, 128, torch.float32),
        (1, 1, 1, 1, torch.float32), (3, 32, 32, 8, torch.float16),
    ],
)  # fmt: skip
def test_route(device, tokens, experts, topk, tile_rows, dtype):
    logits, bias = separated(tokens, experts, dtype, device)
    exact = logits.detach().double().requires_grad_()
    options = {"tile_rows": tile_rows, "scale": 2.5}
    out = moe_route(logits, bias, topk, **options)
    expected = moe_route_reference(exact, bias.double(), topk, **options)
    same_rows(out, expected)
    torch.testing.assert_close(out.cutoff.double(), expected.cutoff, rtol=1e-6, atol=1e-6)
    assert relative(out.weights, expected.weights) < BOUNDS[dtype][0]
    grad = torch.randn_like(out.weights)
    out.weights.backward(grad)
    expected.weights.backward(grad.double())
    assert logits.grad.dtype == dtype
    assert torch.equal(logits.grad != 0, exact.grad != 0) or topk == experts
    if topk > 1:
        assert relative(logits.grad, exact.grad) < BOUNDS[dtype][1]
    else:
        assert logits.grad.abs().max() < 1e-6  # a weight alone is constant


@pytest.mark.parametrize("levels", [1, 3, 40])
def test_ties_go_to_the_lower_expert(device, levels):
    scores = torch.randint(0, levels, (5, 896)).to(device) / 64
    bias = torch.randint(-3, 4, (896,)).to(device) / 64
    for b, topk in ((None, 16), (bias, 16), (bias, 7), (bias, 32)):
        out = moe_route(scores, b, topk, input="scores")
        expected = moe_route_reference(scores, b, topk, input="scores")
        same_rows(out, expected)
        assert torch.equal(out.cutoff, expected.cutoff)
        torch.testing.assert_close(out.weights, expected.weights)


def test_scores_of_any_size(device):
    """Bisection over all exponents, a lone peak, zeros of both signs, and equal but for one bit."""
    scores = torch.rand(6, 100)
    scores[0] = 10 ** (80 * scores[0] - 42)
    scores[1] = 0
    scores[1, 70] = 1
    scores[2, ::2], scores[2, 1::2] = 0.0, -0.0
    scores[3] = 0.25
    scores[3, 80:] += 2**-26
    scores[4, 3:] = 0
    bias = -torch.rand(100)
    bias[50:] = 0
    scores, bias = scores.to(device), bias.to(device)
    for b in (None, bias):
        out = moe_route(scores, b, 5, input="scores", tile_rows=4)
        expected = moe_route_reference(scores, b, 5, input="scores", tile_rows=4)
        same_rows(out, expected)
        assert torch.equal(out.cutoff, expected.cutoff)


def test_infinities_and_nan_keep_their_row(device):
    logits = torch.randn(4, 40, device=device)
    logits[0, 3:] = -float("inf")
    logits[1, 5] = float("inf")
    logits[2, [7, 9]] = float("nan")
    logits[3] = float("nan")
    out = moe_route(logits, None, 4, tile_rows=2)
    assert out.experts[0].tolist()[3] == 3 and out.experts[1, 0] == 5
    assert out.experts[2, :2].tolist() == [7, 9]
    assert out.experts[3].tolist() == [0, 1, 2, 3] and out.cutoff[3].isnan()
    assert out.weights[:2].isfinite().all() and out.weights[2:].isnan().all()
    assert out.counts.sum() == 16


@pytest.mark.parametrize("tokens", [31, 32, 65, 2100])
def test_tokens_ascend_inside_an_expert(device, tokens):
    scores = torch.rand(tokens, 6, device=device)
    out = moe_route(scores, None, 2, input="scores", tile_rows=32)
    same_rows(out, moe_route_reference(scores, None, 2, input="scores", tile_rows=32))
    again = moe_route(scores, None, 2, input="scores", tile_rows=32)
    assert all(torch.equal(a, b) for a, b in zip(out, again, strict=True))


def test_all_tokens_to_the_same_experts(device):
    scores = torch.rand(70, 300, device=device)
    bias = torch.zeros(300, device=device)
    bias[[2, 130, 299]] = 5
    out = moe_route(scores, bias, 3, input="scores", tile_rows=64)
    same_rows(out, moe_route_reference(scores, bias, 3, input="scores", tile_rows=64))
    assert out.counts[[2, 130, 299]].tolist() == [70] * 3 and out.offsets[-1] == 3 * 128


def test_columns_of_a_wider_matrix(device):
    wide = torch.rand(8, 50, device=device).requires_grad_()
    bias = torch.rand(1, device=device).expand(20)
    for view in (lambda x: x[:, 7:27], lambda x: x.T[:20, :8].T, lambda x: x[::2, ::2][:, :20]):
        scores = view(wide)
        out = moe_route(scores, bias, 3, input="scores", tile_rows=4)
        expected = moe_route_reference(scores, bias, 3, input="scores", tile_rows=4)
        same_rows(out, expected)
        grad = torch.randn(3, scores.shape[0], device=device).T
        ours, theirs = (torch.autograd.grad(r.weights, wide, grad)[0] for r in (out, expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    expected.weights.sum()  # one number seen as the gradient of every weight
    ours, theirs = (
        torch.autograd.grad(f(wide, None, 3, tile_rows=4).weights[:, 0].sum(), wide)[0]
        for f in (moe_route, moe_route_reference)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_no_tokens(device):
    logits = torch.randn(0, 12, device=device, requires_grad=True)
    out = moe_route(logits, None, 3)
    same_rows(out, moe_route_reference(logits, None, 3))
    assert not out.counts.any() and not out.offsets.any() and out.token_of_row.numel() == 0
    out.weights.sum().backward()
    assert logits.grad.shape == (0, 12)


def test_rows_suffice():
    """One token too few or too many per tile for every expert is the worst case."""
    for tokens, experts, topk, tile_rows in ((64, 4, 2, 32), (1, 896, 16, 64), (5, 7, 7, 1)):
        rows = padded_rows(tokens, experts, topk, tile_rows)
        slots = tokens * topk
        used = min(experts, slots)
        worst = sum(-(-c // tile_rows) * tile_rows for c in [1] * (used - 1) + [slots - used + 1])
        assert worst <= rows and rows % tile_rows == 0


def test_operator_is_sound(device):
    logits, bias = separated(5, 24, torch.float32, device)
    for b in (bias, None):
        torch.library.opcheck(torch.ops.minitriton.moe_route, (logits, b, 3, 8, 1.5, True))


def test_torch_compile_without_graph_breaks(device):
    logits, bias = separated(6, 24, torch.float32, device)

    def layer(x):
        routing = moe_route(x * 2, bias, 3, tile_rows=8)
        return (routing.weights * routing.row_of_slot).sum(), routing

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    (ours, routing), (theirs, expected) = compiled(logits), layer(logits)
    same_rows(routing, expected)
    torch.testing.assert_close(
        torch.autograd.grad(ours, logits), torch.autograd.grad(theirs, logits)
    )


def test_captured_in_a_graph(device):
    if device != "cuda":
        pytest.skip("graphs are the GPU's")
    scores = torch.rand(300, 896, device=device)
    moe_route(scores, None, 16, input="scores")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe_route(scores, None, 16, input="scores")
    for _ in range(2):
        scores.copy_(torch.rand_like(scores))
        graph.replay()
        same_rows(out, moe_route_reference(scores, None, 16, input="scores"))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda x, b: ((x.double(), b), {}), "argument 'logits': dtype torch.float64"),
        (lambda x, b: ((x[0], b), {}), r"argument 'logits': shape \(20,\); it must be \[T, E\]"),
        (lambda x, b: ((x[:, :0], None), {}), "with 1 <= E <= 1024"),
        (lambda x, b: ((x.repeat(1, 60), None), {}), r"argument 'logits': shape \(4, 1200\)"),
        (lambda x, b: ((None, b), {}), "argument 'logits': expected a tensor, got NoneType"),
        (lambda x, b: ((x, b[:3]), {}), r"argument 'bias': shape \(3,\); .* needs \(20,\)"),
        (lambda x, b: ((x, b.half()), {}), "argument 'bias': dtype torch.float16; it must be fl"),
        (lambda x, b: ((x, b.to("meta")), {}), "argument 'bias': device meta differs"),
        (lambda x, b: ((x, b.requires_grad_()), {}), "argument 'bias': requires a gradient"),
        (lambda x, b: ((x, b, 21), {}), "argument 'topk': must be a whole number from 1 to 20"),
        (lambda x, b: ((x, b, 0), {}), "argument 'topk': .* got 0"),
        (lambda x, b: ((x, b, 2.0), {}), "argument 'topk': .* got 2.0"),
        (lambda x, b: ((x, b), {"tile_rows": 48}), "argument 'tile_rows': 48 is not a power of"),
        (lambda x, b: ((x, b), {"tile_rows": 2048}), "argument 'tile_rows': .* from 1 to 1024"),
        (lambda x, b: ((x, b), {"scale": 0}), "argument 'scale': must be a positive number"),
        (lambda x, b: ((x, b), {"input": "softmax"}), "argument 'input': 'softmax'; it must be"),
    ],
)
def test_refused_before_launch(device, change, match):
    logits, bias = torch.randn(4, 20, device=device), torch.zeros(20, device=device)
    arguments, options = change(logits, bias)
    with pytest.raises(KernelArgumentError, match=match):
        moe_route(*arguments, **options)
