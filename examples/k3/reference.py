"""The stack in plain torch, in whatever dtype its parameters have: what the kernels must equal.

AttnRes here is its definition, a softmax over the block sums so far, not the streaming schedule.
"""

from __future__ import annotations

import torch

from examples.k3.layers import KDA, LATENT_EPS, DenseFF, GatedMLA, LatentMoE
from examples.k3.model import Stack
from minitriton.kernels import (
    attn_res_mix_reference,
    gated_rms_norm_reference,
    rms_norm_reference,
)
from minitriton.kernels.kda import chunk_kda_reference
from minitriton.kernels.mla_prefill import mla_attention_reference
from minitriton.kernels.moe_experts import moe_experts_reference
from minitriton.kernels.moe_routing import moe_route_reference
from minitriton.kernels.short_conv import short_conv_reference
from minitriton.kernels.situ_gemm import situ_glu_linear_reference


def stack_reference(model: Stack, x: torch.Tensor) -> torch.Tensor:
    """What `model(x)` computes; differentiable with respect to x and all parameters."""
    config = model.config
    sub_layers = [f for pair in zip(model.mixers, model.feeds, strict=True) for f in pair]
    blocks, outputs = [x], []
    for i, sub_layer in enumerate(sub_layers):
        if i and i % (2 * config.block) == 0:  # a block is complete
            blocks.append(torch.stack(outputs).sum(0))
            outputs = []
        h = _read(model, i, blocks, outputs)
        outputs.append(_sub_layer(sub_layer, h))
    return _read(model, len(sub_layers), blocks, outputs)


def _read(model: Stack, i: int, blocks: list, outputs: list) -> torch.Tensor:
    sources = [*blocks, *([torch.stack(outputs).sum(0)] if outputs else [])]
    h = attn_res_mix_reference(torch.stack(sources), model.queries[i], model.key_norms[i])
    return rms_norm_reference(h, model.in_norms[i])


def _sub_layer(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    if isinstance(module, KDA):
        return _kda(module, x)
    if isinstance(module, GatedMLA):
        return _mla(module, x)
    return _moe(module, x) if isinstance(module, LatentMoE) else _dense(module, x)


def _kda(m: KDA, x: torch.Tensor) -> torch.Tensor:
    heads = (m.heads, m.head)
    qkv, _ = short_conv_reference(x @ m.qkv.T, m.conv)
    q, k, v = qkv.unflatten(2, (3, *heads)).unbind(2)
    z = (x @ m.decay_down.T @ m.decay_up.T).unflatten(2, heads)
    o, _ = chunk_kda_reference(
        q, k, v, z, x @ m.beta.T, gate="sigmoid", A_log=m.A_log, dt_bias=m.dt_bias,
        qk_l2norm=True, beta_sigmoid=True,
    )  # fmt: skip
    gate = (x @ m.gate.T).view(o.shape)
    return gated_rms_norm_reference(o, gate, m.norm).flatten(2) @ m.out.T


def _mla(m: GatedMLA, x: torch.Tensor) -> torch.Tensor:
    c = m.config
    q = rms_norm_reference(x @ m.q_down.T, m.q_norm, LATENT_EPS) @ m.q_up.T
    latent, shared = (x @ m.kv_down.T).split([c.kv_rank, c.shared], 2)
    up = rms_norm_reference(latent, m.kv_norm, LATENT_EPS) @ m.kv_up.T
    k, v = up.unflatten(2, (c.heads, -1)).split([c.nope, c.value], 3)
    gate = (x @ m.gate.T).unflatten(2, (c.heads, -1))
    o, _ = mla_attention_reference(q.unflatten(2, (c.heads, -1)), k, shared, v, gate)
    return o.flatten(2) @ m.out.T


def _dense(m: DenseFF, x: torch.Tensor) -> torch.Tensor:
    return situ_glu_linear_reference(x, m.up) @ m.down.T


def _moe(m: LatentMoE, x: torch.Tensor) -> torch.Tensor:
    tokens = x.flatten(0, 1)
    logits = tokens @ m.router.T
    routing = moe_route_reference(logits, m.bias, m.config.topk)
    m.logits = logits.detach()
    m.routing = routing._replace(weights=routing.weights.detach())
    u = moe_experts_reference(tokens @ m.latent_down.T, m.w13, m.w2, routing)
    return _dense(m.shared, x) + (rms_norm_reference(u, m.norm) @ m.latent_up.T).view(x.shape)
