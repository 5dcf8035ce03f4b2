"""Multi-head latent attention: prefill with a shared part of keys, decoding over a paged cache."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from minitriton import kernels
from minitriton.bench.cases import Case, Setting, exact_fp32, normal, one
from minitriton.bench.functions import Function, empty
from minitriton.bench.roofline import Work

PAGE = 64  # tokens


def _head(
    q: torch.Tensor, k: torch.Tensor, shared: torch.Tensor, v: torch.Tensor, gate: torch.Tensor
) -> torch.Tensor:
    """One head, operands [batch, tokens, width]."""
    scores = q @ torch.cat([k, shared], -1).mT * q.shape[-1] ** -0.5
    hidden = torch.ones_like(scores, dtype=torch.bool).triu_(1)
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ v * torch.sigmoid(gate)


def _exact(q: torch.Tensor, k: torch.Tensor, shared: torch.Tensor, v: torch.Tensor,
           gate: torch.Tensor) -> torch.Tensor:  # fmt: skip
    """Head by head, and again for the gradients: scores of 8192 tokens take 268 MB a head."""
    heads = [
        checkpoint(_head, q[:, :, h], k[:, :, h], shared, v[:, :, h], gate[:, :, h],
                   use_reentrant=False)
        for h in range(q.shape[2])
    ]  # fmt: skip
    return torch.stack(heads, 2)


def _sdpa(q: torch.Tensor, k: torch.Tensor, shared: torch.Tensor, v: torch.Tensor,
          gate: torch.Tensor) -> torch.Tensor:  # fmt: skip
    key = torch.cat([k, shared[:, :, None].expand(-1, -1, k.shape[2], -1)], -1)
    q, key, value = (x.transpose(1, 2) for x in (q, key, v))
    out = F.scaled_dot_product_attention(q, key, value, is_causal=True).transpose(1, 2)
    return out * torch.sigmoid(gate)


def mla(setting: Setting, tokens: int, heads: int, backward: bool = False) -> Case:
    """Causal, K3's widths: 128 channels of q and k a head, 64 shared, 128 of v, under a gate."""
    q, k, v, gate = (empty(setting, 1, tokens, heads, width) for width in (192, 128, 128, 128))
    shared = empty(setting, 1, tokens, 64)

    def ours(*inputs: torch.Tensor) -> torch.Tensor:
        out = kernels.mla_attention(*inputs)
        assert isinstance(out, torch.Tensor)
        return out

    inputs = [q, k, shared, v, gate]
    function = Function(
        inputs, normal(*inputs), tuple(v.shape), _exact,
        {"minitriton library": lambda: ours}, plain=_sdpa,
    )  # fmt: skip
    flop = 320.0 * heads * tokens**2
    row = 2.0 * (heads * (192 + 3 * 128) + 64)
    moved = (tokens * (row + 256 * heads), 2 * tokens * row)
    # five products for the forward's two: scores again, and four with 192 or 128 channels
    return function.case(moved, (flop, 2.6 * flop), "bf16", backward=backward, bounds=(1e-2, 2e-2))


def mla_decode(setting: Setting, batch: int, length: int, heads: int) -> Case:
    """One token a sequence over pages in random order, rows of 512 + 64 channels in bf16."""
    pages = length // PAGE
    cache, q = empty(setting, batch * pages, PAGE, 576), empty(setting, batch, 1, heads, 576)
    table = torch.zeros(batch, pages, device=setting.device, dtype=torch.int32)
    lengths = torch.full((batch,), length, device=setting.device, dtype=torch.int32)
    scale = 192**-0.5

    def refill() -> None:
        normal(cache, q)()
        table.copy_(torch.randperm(batch * pages, device=table.device).view_as(table))

    def plain() -> torch.Tensor:
        rows = cache[table.long()].view(batch, 1, -1, 576)
        p = torch.softmax(q.transpose(1, 2) @ rows.mT * scale, -1)
        return (p @ rows[..., :512]).transpose(1, 2)

    def reference() -> list[torch.Tensor]:
        with exact_fp32():
            out, _ = kernels.mla_decode_reference(q.float(), cache, table, lengths, scale=scale)
        return [out]

    contenders: dict[str, Any] = {
        "minitriton library": one(
            lambda: kernels.mla_decode(q, cache, table, lengths, scale=scale)
        ),
        "torch": one(plain),
    }
    work = Work(1152.0 * batch * length, 2176.0 * heads * batch * length, "bf16")
    return Case(work, refill, reference, contenders, bound=2e-2)  # torch keeps scores in bf16
