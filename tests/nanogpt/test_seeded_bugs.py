"""Eleven bugs that loss curves hide, put into the model on purpose: the gradient test sees each.

The list is that of bugs found hard to notice in a loss curve: wrong GELU, a scaled dQ, a doubled
dW, missing gradients, a mask off by one.
"""

import dataclasses

import pytest
import torch
from torch.nn import functional as F

import examples.nanogpt.model as model_file
from examples.nanogpt.model import GPT
from examples.nanogpt.twin import Twin
from tests.nanogpt.models import batch_of, errors, gradients, in_fp64, make

THRESHOLD = 1e-4  # thirty times what the right model may show


class Changed(torch.autograd.Function):
    """The identity, whose gradient goes through a function."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.change(grad.clone()), None


def with_gradient(x, change):
    return Changed.apply(x, change)


def zero_part(index):
    def change(grad):
        grad[index] = 0
        return grad

    return change


def patch(monkeypatch, name, replacement):
    right = getattr(model_file, name)
    calls = []

    def wrapped(*args, **kwargs):
        calls.append(None)
        return replacement(right, len(calls) - 1, *args, **kwargs)

    monkeypatch.setattr(model_file, name, wrapped)


def tanh_gelu(monkeypatch, config):
    def wrong(right, call, x, up, down, *rest, **options):
        return F.linear(F.gelu(F.linear(x, up), approximate="tanh"), down)

    patch(monkeypatch, "gelu_mlp", wrong)


def gelu_slope_without_density(monkeypatch, config):
    def wrong(right, call, x, up, down, *rest, **options):
        pre = F.linear(x, up)
        cdf = (0.5 * (1 + torch.erf(pre / 2**0.5))).detach()
        return F.linear(pre * cdf, down)

    patch(monkeypatch, "gelu_mlp", wrong)


def on_qkv(change):
    def bug(monkeypatch, config):
        def wrong(right, call, qkv, heads, **options):
            return right(with_gradient(qkv, lambda g: change(g, config)), heads, **options)

        patch(monkeypatch, "packed_attention", wrong)

    return bug


def scale_dq(grad, config):
    grad[..., : config.width] *= 1.05
    return grad


def last_rows_of_dk(grad, config):
    grad[:, -16:, config.width : 2 * config.width] = 0
    return grad


def dv_of_one_head(grad, config):
    grad[..., 2 * config.width : 2 * config.width + config.width // config.heads] = 0
    return grad


def on_weight(change, which):
    """Changes the gradient of the weight of the `which`-th linear layer of a forward pass."""

    def bug(monkeypatch, config):
        def wrong(right, call, x, weight, *rest, **options):
            if call == which:
                weight = with_gradient(weight, change)
            return right(x, weight, *rest, **options)

        patch(monkeypatch, "linear", wrong)

    return bug


def no_norm_gradients(monkeypatch, config):
    def wrong(right, call, stream, branch, weight, *rest, **options):
        return right(stream, branch, weight.detach() + 0 * weight, *rest, **options)

    patch(monkeypatch, "add_layer_norm", wrong)


def loss_not_divided(monkeypatch, config):
    def wrong(right, call, logits, targets, **options):
        return right(with_gradient(logits, lambda g: g * targets.numel()), targets, **options)

    patch(monkeypatch, "cross_entropy", wrong)


def no_position_gradient(monkeypatch, config):
    def wrong(right, call, ids, weight, positions, **options):
        return right(ids, weight, with_gradient(positions, torch.zeros_like), **options)

    patch(monkeypatch, "tied_embedding", wrong)


def mask_off_by_one(monkeypatch, config):
    def wrong(right, call, qkv, heads, **options):
        batch, length, _ = qkv.shape
        q, k, v = (x.transpose(1, 2) for x in qkv.view(batch, length, 3, heads, -1).unbind(2))
        before = torch.ones(length, length, device=q.device).tril(-1).bool()
        before[0, 0] = True
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=before)
        return out.transpose(1, 2).flatten(2)

    patch(monkeypatch, "packed_attention", wrong)


BUGS = {
    "tanh GELU instead of erf": tanh_gelu,
    "dQ 5 % too large": on_qkv(scale_dq),
    "dW of one layer doubled": on_weight(lambda g: g * 2, 1),
    "gradients of norm weights all zero": no_norm_gradients,
    "last 16 rows of dK never written": on_qkv(last_rows_of_dk),
    "dV of one head missing": on_qkv(dv_of_one_head),
    "dW of one qkv layer zero": on_weight(torch.zeros_like, 0),
    "gradient of the loss not divided by the tokens": loss_not_divided,
    "GELU's slope without its density": gelu_slope_without_density,
    "positions get no gradient": no_position_gradient,
    "causal mask off by one": mask_off_by_one,
}


@pytest.fixture
def exact(config, corpus):
    """The configuration, a batch, and its gradients in fp64."""
    config = dataclasses.replace(config, dropout=0.0, batch=1)
    batch = batch_of(corpus, config)
    return config, batch, gradients(in_fp64(make(Twin, config, corpus, trained=True)), *batch)[1]


def worst_error(exact, corpus):
    config, batch, wanted = exact
    _, found = gradients(make(GPT, config, corpus, trained=True), *batch)
    return max(errors(found, wanted).values())


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_bug_is_seen(exact, corpus, bug, monkeypatch):
    bug(monkeypatch, exact[0])
    assert worst_error(exact, corpus) > THRESHOLD


def test_without_a_bug_nothing_is_seen(exact, corpus):
    assert worst_error(exact, corpus) < THRESHOLD / 30
