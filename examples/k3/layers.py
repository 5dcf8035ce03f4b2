"""K3's sub-layers on the kernel library: for training and prefill, and token by token.

Each mixer has `forward(x, cache=None)` for whole sequences, which starts from the cache and leaves
it after the last token if one is given, and `step(x, cache)` for the next token of every sequence.
Shapes: x is [B, T, width]. Source: Kimi K3 technical report, sections 2.1 to 2.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from minitriton.kernels import gated_rms_norm, rms_norm
from minitriton.kernels.kda import chunk_kda
from minitriton.kernels.kda_decode import recurrent_kda
from minitriton.kernels.linear import linear
from minitriton.kernels.mla_absorb import mla_absorb_query, mla_value_up
from minitriton.kernels.mla_cache import mla_cache_write
from minitriton.kernels.mla_decode import mla_decode
from minitriton.kernels.mla_prefill import mla_attention
from minitriton.kernels.moe_experts import expert_tile_rows, moe_experts
from minitriton.kernels.moe_router import moe_route
from minitriton.kernels.moe_routing import Routing
from minitriton.kernels.short_conv import short_conv
from minitriton.kernels.short_conv_step import short_conv_step
from minitriton.kernels.situ_gemm import situ_glu_linear

PAGE = 64  # tokens per block of the MLA cache
LATENT_EPS = 1e-6  # of the norms inside MLA


@dataclass(frozen=True)
class Config:
    """Sizes; the defaults are a model for tests. K3's own stand in the comments."""

    width: int = 64  # 7168
    layers: int = 4  # 93, every fourth and the last with MLA
    block: int = 2  # decoder layers per AttnRes block: 12
    heads: int = 2  # 96
    head: int = 32  # channels of a KDA head: 128
    decay_rank: int = 16  # 128
    q_rank: int = 48  # 1536
    kv_rank: int = 64  # 512
    nope: int = 32  # 128
    shared: int = 16  # 64
    value: int = 32  # 128
    experts: int = 8  # 896
    topk: int = 2  # 16
    latent: int = 32  # 3584
    expert_ff: int = 32  # 3072
    shared_ff: int = 64  # 6144
    dense_ff: int = 96  # 33792, layer 0

    def is_mla(self, layer: int) -> bool:
        return layer % 4 == 3 or layer == self.layers - 1


def matrix(rows: int, columns: int, scale: float = 1.0) -> nn.Parameter:
    """Gaussian weights that keep the size of what they multiply, times `scale`."""
    return nn.Parameter(torch.randn(rows, columns) * (scale / columns**0.5))


@dataclass
class KDACache:
    """Per sequence: the last three inputs of the convolution, and the state of every head."""

    conv: torch.Tensor  # [B, 3, 3 heads head]
    state: torch.Tensor  # fp32 [B, heads, head, head]


class KDA(nn.Module):
    """Kimi Delta Attention with short convolution, bounded decay and gated output norm."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.head = config.heads, config.head
        inner = config.heads * config.head
        self.qkv = matrix(3 * inner, config.width)
        self.conv = nn.Parameter(torch.randn(3 * inner, 4) * 0.5)
        self.decay_down = matrix(config.decay_rank, config.width)
        self.decay_up = matrix(inner, config.decay_rank)
        self.A_log = nn.Parameter(torch.zeros(config.heads))
        step = torch.exp(torch.empty(config.heads, config.head).uniform_(-6.9, -2.3))
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.beta = matrix(config.heads, config.width)
        self.gate = matrix(inner, config.width)
        self.norm = nn.Parameter(torch.ones(config.head))
        self.out = matrix(config.width, inner)

    def new_cache(self, batch: int) -> KDACache:
        """The cache of sequences that have not begun."""
        inner = self.heads * self.head
        device, dtype = self.qkv.device, self.qkv.dtype
        return KDACache(
            torch.zeros(batch, 3, 3 * inner, device=device, dtype=dtype),
            torch.zeros(batch, self.heads, self.head, self.head, device=device),
        )

    def forward(self, x: torch.Tensor, cache: KDACache | None = None) -> torch.Tensor:
        """[B, T, width] for a whole sequence, or the next part of one."""
        keep = cache is not None
        qkv, conv = short_conv(
            linear(x, self.qkv), self.conv, initial_state=cache.conv if cache else None,
            output_final_state=keep,
        )  # fmt: skip
        o, state = chunk_kda(
            *self._heads(qkv), *self._gates(x), gate="sigmoid", A_log=self.A_log,
            dt_bias=self.dt_bias, qk_l2norm=True, beta_sigmoid=True,
            initial_state=cache.state if cache else None, output_final_state=keep,
        )  # fmt: skip
        if cache is not None:
            cache.conv, cache.state = conv, state
        gate = linear(x, self.gate).view(o.shape)
        return linear(gated_rms_norm(o, gate, self.norm).flatten(2), self.out)

    def step(self, x: torch.Tensor, cache: KDACache) -> torch.Tensor:
        """[B, 1, width] for the next token; the cache moves on in place."""
        qkv = short_conv_step(linear(x, self.qkv), self.conv, cache.conv)
        q, k, v = self._heads(qkv)
        y, _ = recurrent_kda(
            q, k, v, *self._gates(x), gate="sigmoid", A_log=self.A_log, dt_bias=self.dt_bias,
            qk_l2norm=True, beta_sigmoid=True, state=cache.state,
            out_gate=linear(x, self.gate).view(v.shape), norm_weight=self.norm,
        )  # fmt: skip
        return linear(y.flatten(2), self.out)

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return qkv.unflatten(2, (3, self.heads, self.head)).unbind(2)

    def _gates(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What decay and beta are computed from."""
        z = linear(linear(x, self.decay_down), self.decay_up)
        return z.unflatten(2, (self.heads, self.head)), linear(x, self.beta)


@dataclass
class MLACache:
    """Pages of latent rows, of which every sequence has its own."""

    rows: torch.Tensor  # [blocks, 64, kv_rank + shared]
    table: torch.Tensor  # int32 [B, pages], the block of each page
    lengths: torch.Tensor  # int32 [B]

    def take_slots(self, tokens: int) -> torch.Tensor:
        """Places [B, tokens] of the next tokens of every sequence; lengths grow by `tokens`."""
        place = self.lengths[:, None] + torch.arange(tokens, device=self.lengths.device)
        block = torch.gather(self.table, 1, (place // PAGE).long())
        self.lengths += tokens
        return block * PAGE + place % PAGE


class GatedMLA(nn.Module):
    """Latent attention without positions, under a sigmoid gate."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        c = self.config = config
        self.q_down = matrix(c.q_rank, c.width)
        self.q_norm = nn.Parameter(torch.ones(c.q_rank))
        self.q_up = matrix(c.heads * (c.nope + c.shared), c.q_rank)
        self.kv_down = matrix(c.kv_rank + c.shared, c.width)
        self.kv_norm = nn.Parameter(torch.ones(c.kv_rank))
        self.kv_up = matrix(c.heads * (c.nope + c.value), c.kv_rank)
        self.gate = matrix(c.heads * c.value, c.width)
        self.out = matrix(c.width, c.heads * c.value)

    def new_cache(self, batch: int, tokens: int) -> MLACache:
        """The cache of sequences that have not begun and may grow to so many tokens."""
        pages = -(-tokens // PAGE)
        rows = torch.zeros(
            batch * pages, PAGE, self.config.kv_rank + self.config.shared,
            device=self.q_down.device, dtype=self.q_down.dtype,
        )  # fmt: skip
        blocks = torch.randperm(batch * pages, dtype=torch.int32).view(batch, pages)
        lengths = torch.zeros(batch, dtype=torch.int32, device=rows.device)
        return MLACache(rows, blocks.to(rows.device), lengths)

    def forward(self, x: torch.Tensor, cache: MLACache | None = None) -> torch.Tensor:
        """[B, T, width] for whole sequences; a cache must be new."""
        c = self.config
        q, kv = self._query(x), linear(x, self.kv_down)
        latent, shared = kv[..., : c.kv_rank], kv[..., c.kv_rank :]
        if cache is not None:
            self._remember(kv, cache)
        up = linear(rms_norm(latent, self.kv_norm, LATENT_EPS), self.kv_up)
        k_nope, v = up.unflatten(2, (c.heads, -1)).split([c.nope, c.value], 3)
        gate = linear(x, self.gate).unflatten(2, (c.heads, -1))
        return linear(mla_attention(q, k_nope, shared, v, gate).flatten(2), self.out)

    def step(self, x: torch.Tensor, cache: MLACache) -> torch.Tensor:
        """[B, 1, width] for the next token, against the latent rows themselves."""
        c = self.config
        self._remember(linear(x, self.kv_down), cache)
        w_uk, w_uv = self.kv_up.unflatten(0, (c.heads, -1)).split([c.nope, c.value], 1)
        q_nope, q_shared = self._query(x).split([c.nope, c.shared], 3)
        q = mla_absorb_query(q_nope, w_uk, q_shared)
        o = mla_decode(
            q, cache.rows, cache.table, cache.lengths, scale=(c.nope + c.shared) ** -0.5,
            latent=c.kv_rank,
        )  # fmt: skip
        gate = linear(x, self.gate).unflatten(2, (c.heads, -1))
        return linear(mla_value_up(o, w_uv, gate).flatten(2), self.out)

    def _query(self, x: torch.Tensor) -> torch.Tensor:
        low = rms_norm(linear(x, self.q_down), self.q_norm, LATENT_EPS)
        return linear(low, self.q_up).unflatten(2, (self.config.heads, -1))

    def _remember(self, kv: torch.Tensor, cache: MLACache) -> None:
        with torch.no_grad():
            latent, shared = (
                kv.detach().flatten(0, 1).split([self.config.kv_rank, self.config.shared], 1)
            )
            slots = cache.take_slots(kv.shape[1]).flatten()
            mla_cache_write(
                cache.rows, latent, shared, slots, norm_weight=self.kv_norm.detach(),
                eps=LATENT_EPS,
            )  # fmt: skip


class DenseFF(nn.Module):
    """SiTU-GLU perceptron."""

    def __init__(self, width: int, ff: int) -> None:
        super().__init__()
        self.up, self.down = matrix(2 * ff, width), matrix(width, ff)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] to [..., width]."""
        return linear(situ_glu_linear(x, self.up), self.down)


class LatentMoE(nn.Module):
    """Routed experts in a latent space beside one shared expert; bias balances the router."""

    bias: torch.Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        c = self.config = config
        self.router = matrix(c.experts, c.width)
        self.register_buffer("bias", torch.zeros(c.experts))
        self.latent_down, self.latent_up = matrix(c.latent, c.width), matrix(c.width, c.latent)
        self.w13 = nn.Parameter(torch.randn(c.experts, 2 * c.expert_ff, c.latent) / c.latent**0.5)
        self.w2 = nn.Parameter(torch.randn(c.experts, c.latent, c.expert_ff) / c.expert_ff**0.5)
        self.norm = nn.Parameter(torch.ones(c.latent))
        self.shared = DenseFF(c.width, c.shared_ff)
        # of the last call, for balancing; without a graph: it would keep parameters' nodes alive,
        # and these the stream of that call
        self.logits: torch.Tensor | None = None
        self.routing: Routing | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] to [..., width]."""
        c = self.config
        tokens = x.flatten(0, -2)
        logits = linear(tokens.float(), self.router)
        tile_rows = expert_tile_rows(tokens.shape[0], c.topk, c.experts)
        routing = moe_route(logits, self.bias, c.topk, tile_rows=tile_rows)
        self.logits = logits.detach()
        self.routing = routing._replace(weights=routing.weights.detach())
        u = moe_experts(linear(tokens, self.latent_down), self.w13, self.w2, routing)
        routed = linear(rms_norm(u, self.norm), self.latent_up)
        return self.shared(x) + routed.view(x.shape)
