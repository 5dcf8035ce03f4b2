"""Quantile balancing: exact against torch bit for bit, histograms within a bin, loads even out."""

import math

import pytest
import torch

from minitriton.kernels import quantile_selection
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


def bits(values):
    """fp32 as integers in its order: NaN last, both zeros equal."""
    found = (values.float() + 0.0).contiguous().view(torch.int32)
    found = torch.where(found < 0, found ^ 0x7FFFFFFF, found)
    return torch.where(values.isnan(), 2**31 - 1, found)


def select(scores, cutoff, wanted):
    """(the selected margins, those that a sort in torch finds), as `bits`."""
    x = scores if scores.stride(-1) == 1 else scores.contiguous()
    found = quantile_selection.negated_quantiles(x, cutoff, wanted)
    margins = bits(scores.float() - cutoff[:, None])
    return bits(-found), margins.sort(0, descending=True).values[wanted - 1]


@pytest.fixture
def small_sample(monkeypatch):
    """Few tokens take all four steps."""
    monkeypatch.setattr(quantile_selection, "SAMPLE", 128)


def spread(name, tokens, experts):
    """Scores that the sample represents well, badly, or not at all."""
    x = torch.rand(tokens, experts)
    if name == "sorted":
        return x.sort(0).values
    if name == "equal":
        return torch.full_like(x, 0.25)
    if name == "ties":
        return (x * 8).round() / 8
    if name == "not numbers":
        x[5::7, 1], x[:, 2], x[3::5, 3] = math.nan, -math.inf, math.inf
    if name == "unlike its sample":  # the sample sees none of those that decide
        x[:: tokens // 128] -= 2
    return x


@pytest.mark.parametrize(
    "name", ["even", "sorted", "equal", "ties", "not numbers", "unlike its sample"]
)
def test_selection_in_one_pass(device, small_sample, name):
    scores = spread(name, 700, 20).to(device)
    cutoff = torch.rand(700, device=device) if name == "even" else torch.zeros(700, device=device)
    found, expected = select(scores, cutoff, 60)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selection_by_a_whole_sample(device, dtype):
    scores = torch.rand(2200, 33, device=device).to(dtype)
    cutoff = torch.rand(2200, device=device)
    for x in (scores[:, :32], scores[:, 1:]):
        found, expected = select(x, cutoff, 45)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("wanted", [1, 2, 350, 699, 700])
def test_selection_of_any_rank(device, small_sample, wanted):
    found, expected = select(
        torch.rand(700, 9, device=device), torch.rand(700, device=device), wanted
    )
    assert torch.equal(found, expected)


def test_selection_where_bracket_and_buffer_fail(device, small_sample, monkeypatch):
    scores, cutoff = torch.rand(1100, 40, device=device), torch.zeros(1100, device=device)
    ranks = {"too high": (-9, 2, 2048), "too low": (40, 129, 2048), "no room": (0, 129, 1024)}
    for name, (fewest, most, room) in ranks.items():
        monkeypatch.setattr(
            quantile_selection, "sample_ranks", lambda m, q, ranks=(fewest, most, room): ranks
        )
        found, expected = select(scores, cutoff, 110)
        assert torch.equal(found, expected), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_selection_of_narrow_scores_at_a_distance(device, small_sample, dtype):
    wide = torch.rand(400, 70, device=device).to(dtype)
    for scores in (wide[:, 3:33], wide[::2, 8:24], wide.T.contiguous().T[:, :12]):
        cutoff = torch.rand(len(scores), device=device)
        found, expected = select(scores, cutoff, 33)
        assert torch.equal(found, expected)


def test_rank_in_the_sample(device):
    for tokens, wanted in ((4097, 1), (65536, 1171), (65536, 65536), (10**6, 500_000)):
        fewest, most, room = quantile_selection.sample_ranks(tokens, wanted)
        rank = quantile_selection.SAMPLE * wanted / tokens
        assert fewest < rank < most and 0 < room < 2 * tokens
    assert quantile_selection.sample_ranks(65536, 1171)[2] < 65536 / 15


@pytest.mark.parametrize(
    ("tokens", "experts", "topk"), [(7, 896, 16), (6, 14, 13), (3, 300, 140), (5, 129, 32)]
)
def test_cutoffs(device, tokens, experts, topk):
    scores, bias = torch.rand(tokens, experts), torch.randn(experts) / 5
    scores[0] = (scores[0] * 4).round()  # ties
    scores[1, ::2], scores[2] = math.inf, 0.5
    scores, bias = scores.to(device), bias.to(device)
    expected = (scores + bias).sort(1, descending=True).values[:, topk]
    assert torch.equal(quantile_selection.cutoffs(scores, bias, topk), expected)
    if topk <= 32:
        routed = moe_route(scores, bias, topk, input="scores").cutoff
        assert torch.equal(routed, expected)


def test_cutoffs_of_bf16(device):
    scores, bias = torch.rand(9, 40, device=device).bfloat16(), torch.zeros(40, device=device)
    expected = scores.float().sort(1, descending=True).values[:, 5]
    assert torch.equal(quantile_selection.cutoffs(scores, bias, 5), expected)


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
