"""Quantile balancing: exact against torch bit for bit, histograms within a bin, loads even out."""

import pytest
import torch

from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.moe_router import moe_route
from minitriton.kernels.quantile_balancing import (
    quantile_bias,
    quantile_bias_from_histogram,
    quantile_bias_reference,
    quantile_histogram,
)


def skewed(tokens, experts, device, spread=1.5):
    """Scores where later experts are better liked."""
    drift = torch.linspace(-spread, spread, experts)
    return torch.sigmoid(torch.randn(tokens, experts) + drift).to(device)


def bins_of(scores, cutoff, bias, bins):
    """The histogram in fp64, and for each entry whether it is clear of a bin's edge."""
    low, width = bias.double().min() - 1, bias.double().max() - bias.double().min() + 2
    place = (cutoff.double()[:, None] - scores.double() - low) / width * bins
    return place.floor().clamp(0, bins - 1).long(), (place - place.round()).abs() > 1e-3


@pytest.mark.parametrize(
    ("tokens", "experts", "topk"), [(1, 2, 1), (513, 14, 3), (40, 41, 16), (1100, 9, 8)]
)
def test_exact(device, tokens, experts, topk):
    scores, bias = skewed(tokens, experts, device), torch.randn(experts, device=device) / 5
    expected = quantile_bias_reference(scores, bias, topk)
    out = quantile_bias(scores, bias, topk)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    cutoff = moe_route(scores, bias, topk, input="scores").cutoff
    assert torch.equal(out, quantile_bias(scores, bias, topk, cutoff))
    assert abs(out.mean()) < 1e-6


def test_exact_from_narrow_scores_in_a_wider_matrix(device):
    wide = skewed(70, 60, device).bfloat16()
    bias, cutoff = torch.randn(20, device=device) / 5, torch.rand(140, device=device)[::2]
    for scores in (wide[:, 7:27], wide.T.contiguous().T[:, 7:27]):
        expected = quantile_bias_reference(scores.float(), bias, 6, cutoff)
        torch.testing.assert_close(
            quantile_bias(scores, bias, 6, cutoff), expected, rtol=0, atol=1e-6
        )


def test_dead_zone(device):
    """Where load_j <= q < load_j + cutoffs at j the bias stays: exact in multiples of 1/64."""
    scores = torch.randint(0, 64, (300, 10)).to(device) / 64
    bias = torch.randint(-4, 5, (10,)).to(device) / 64
    routing = moe_route(scores, bias, 3, input="scores")
    cutoff = routing.cutoff[:, None]
    above = ((scores + bias) > cutoff).sum(0)
    reached = ((scores + bias) >= cutoff).sum(0)
    q = 300 * 3 // 10
    keeps = (above <= q) & (q < reached)
    # the centre is that of the definition, so that the difference to the bias is one number
    raw = -(scores - cutoff).sort(dim=0, descending=True).values[q]
    out = quantile_bias(scores, bias, 3, routing.cutoff)
    assert 0 < keeps.sum() < 10
    assert torch.equal(raw[keeps], bias[keeps])
    assert (raw[above > q] < bias[above > q]).all() and (
        raw[reached <= q] > bias[reached <= q]
    ).all()
    torch.testing.assert_close(out, raw - raw.mean(), rtol=0, atol=1e-7)


def test_histogram_counts(device):
    scores, bias = skewed(77, 20, device), torch.randn(20, device=device) / 4
    cutoff = moe_route(scores, bias, 4, input="scores").cutoff
    hist = torch.zeros(20, 100, dtype=torch.int32, device=device)
    assert quantile_histogram(scores, cutoff, bias, hist) is hist
    assert (hist.sum(1) == 77).all()
    place, clear = bins_of(scores, cutoff, bias, 100)
    expected = torch.zeros(20, 100, device=device).scatter_add_(1, place.T, clear.T.float())
    assert (hist >= expected).all() and clear.float().mean() > 0.95
    parts = torch.zeros_like(hist)
    for rows in (slice(0, 30), slice(30, 30), slice(30, 77)):  # micro-batches, one of them empty
        quantile_histogram(scores[rows], cutoff[rows], bias, parts)
    assert torch.equal(parts, hist)


def test_outside_the_range_counts_at_its_ends(device):
    scores = torch.tensor([[0.0, 9.0, -9.0]], device=device)
    hist = torch.zeros(3, 8, dtype=torch.int32, device=device)
    quantile_histogram(scores, torch.zeros(1, device=device), torch.zeros(3, device=device), hist)
    assert hist.argmax(1).tolist() == [4, 0, 7] and hist.sum() == 3


@pytest.mark.parametrize("bins", [64, 1000])
def test_histogram_is_within_a_bin_of_exact(device, bins):
    scores, bias = skewed(1500, 14, device), torch.randn(14, device=device) / 10
    cutoff = moe_route(scores, bias, 3, input="scores").cutoff
    hist = torch.zeros(14, bins, dtype=torch.int32, device=device)
    quantile_histogram(scores, cutoff, bias, hist)
    width = (bias.max() - bias.min() + 2) / bins
    out = quantile_bias_from_histogram(hist, bias, 3)
    exact = quantile_bias(scores, bias, 3, cutoff)
    assert (out - exact).abs().max() <= 2 * width  # one more where the means differ
    assert torch.equal(out, quantile_bias_from_histogram(hist, bias, 3))
    kept = quantile_bias_from_histogram(hist, bias, 3, ema=0.75)
    torch.testing.assert_close(kept, 0.75 * bias + 0.25 * out)


def test_interpolation_by_hand(device):
    """Five tokens, k / E = 1/4: the share is 1.25 tokens. Bins are 1/2 wide, from -1."""
    rows = [[0, 1, 4, 0], [5, 0, 0, 0], [1, 1, 1, 2], [0, 0, 0, 5]]
    hist = torch.tensor(rows, dtype=torch.int32, device=device)
    raw = torch.tensor([-0.5 + 0.5 * (1 + 0.25 / 4), -1 + 0.5 * 0.25, -0.5 + 0.5 * 0.25, 0.625])
    out = quantile_bias_from_histogram(hist, torch.zeros(4, device=device), 1)
    torch.testing.assert_close(out.cpu(), raw - raw.mean())


def test_loads_even_out(device):
    experts, topk, tokens = 12, 2, 600
    exact, counted = (torch.zeros(experts, device=device) for _ in range(2))
    share = tokens * topk / experts
    first = moe_route(skewed(tokens, experts, device), None, topk, input="scores").counts.max()
    for _ in range(4):
        scores = skewed(tokens, experts, device)
        exact = quantile_bias(scores, exact, topk)
        cutoff = moe_route(scores, counted, topk, input="scores").cutoff
        hist = torch.zeros(experts, 1000, dtype=torch.int32, device=device)
        quantile_histogram(scores, cutoff, counted, hist)
        counted = quantile_bias_from_histogram(hist, counted, topk)
    scores = skewed(tokens, experts, device)
    for bias in (exact, counted):
        last = moe_route(scores, bias, topk, input="scores").counts.max()
        assert last / share < 1.35 < 2 < first / share


def test_no_tokens(device):
    scores, bias = torch.rand(0, 6, device=device), torch.randn(6, device=device)
    hist = torch.zeros(6, 10, dtype=torch.int32, device=device)
    quantile_histogram(scores, scores[:, 0], bias, hist)
    assert not hist.any()
    for out in (quantile_bias(scores, bias, 2), quantile_bias_from_histogram(hist, bias, 2)):
        torch.testing.assert_close(out, bias - bias.mean())


def test_operators_are_sound(device):
    scores, bias = skewed(9, 6, device), torch.zeros(6, device=device)
    cutoff = moe_route(scores, bias, 2, input="scores").cutoff
    hist = torch.zeros(6, 16, dtype=torch.int32, device=device)
    ops = torch.ops.minitriton
    torch.library.opcheck(ops.quantile_bias, (scores, bias, 2, cutoff))
    torch.library.opcheck(ops.quantile_histogram, (scores, cutoff, bias, hist))
    torch.library.opcheck(ops.quantile_bias_from_histogram, (hist, bias, 2, 0.5))

    def update(scores, bias, hist):
        cutoff = moe_route(scores, bias, 2, input="scores").cutoff
        quantile_histogram(scores, cutoff, bias, hist)
        return quantile_bias(scores, bias, 2), quantile_bias_from_histogram(hist, bias, 2)

    ours, theirs = torch.zeros_like(hist), torch.zeros_like(hist)
    compiled = torch.compile(update, fullgraph=True, backend="aot_eager")(scores, bias, ours)
    torch.testing.assert_close(compiled, update(scores, bias, theirs))
    assert torch.equal(ours, theirs) and ours.any()


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda s, b, c, h: quantile_bias(s.long(), b, 2), "argument 'scores': dtype torch.int64"),
        (lambda s, b, c, h: quantile_bias(s[0], b, 2), r"argument 'scores': shape \(6,\)"),
        (lambda s, b, c, h: quantile_bias(s, b[:2], 2), r"argument 'bias': shape \(2,\)"),
        (lambda s, b, c, h: quantile_bias(s, b, 6), "argument 'topk': .* from 1 to 5, got 6"),
        (lambda s, b, c, h: quantile_bias(s[:, :1], b[:1], 1), "one expert cannot be balanced"),
        (lambda s, b, c, h: quantile_bias(s, b, 2, c[:3]), r"argument 'cutoff': .* \(3,\) on"),
        (lambda s, b, c, h: quantile_bias(s, b, 2, c.half()), "argument 'cutoff': torch.float16"),
        (lambda s, b, c, h: quantile_bias(s.requires_grad_(), b, 2), "'scores': requires a grad"),
        (lambda s, b, c, h: quantile_histogram(s, c, b, h.long()), "'hist': torch.int64; it must"),
        (lambda s, b, c, h: quantile_histogram(s, c, b, None), "argument 'hist': NoneType"),
        (lambda s, b, c, h: quantile_histogram(s, c, b, h[:4]), r"\(4, 16\), .* be \[6, bins\]"),
        (lambda s, b, c, h: quantile_histogram(s, c, b, h[:, ::2]), r"strides \(16, 2\)"),
        (lambda s, b, c, h: quantile_histogram(s, c, b, h.to("meta")), "'hist': device meta"),
        (lambda s, b, c, h: quantile_bias_from_histogram(h[:, :1], b, 2), "argument 'hist': shape"),
        (lambda s, b, c, h: quantile_bias_from_histogram(h, b[:5], 2), "argument 'bias': shape"),
        (lambda s, b, c, h: quantile_bias_from_histogram(h, b, 0), "argument 'topk'"),
        (lambda s, b, c, h: quantile_bias_from_histogram(h, b, 2, 1.0), "argument 'ema': must be"),
    ],
)
def test_refused_before_launch(device, call, match):
    scores, bias = torch.rand(4, 6, device=device), torch.zeros(6, device=device)
    hist = torch.zeros(6, 16, dtype=torch.int32, device=device)
    with pytest.raises(KernelArgumentError, match=match):
        call(scores, bias, torch.zeros(4, device=device), hist)
