"""The result of a mixture-of-experts router, and the router in plain torch.

    s = sigmoid(logits)    T = top k of s + bias    p = scale * s_T / (sum s_T + 1e-20)

The bias only selects. Source: Kimi K3 technical report, section 2.3 (896 experts, k = 16, no groups
of experts). `moe_router` computes the same with kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

EPS = 1e-20  # of the denominator


class Routing(NamedTuple):
    """Who computes what: T tokens, k experts each out of E, rows sorted by expert.

    A *slot* is a pair (token, j). The rows of an expert lie together, its tokens ascending, and
    begin at a multiple of `tile_rows`, so that each tile of so many rows has one expert. The number
    of rows R is the bound of `padded_rows`, known without looking at the data; rows that no slot
    uses, in the last tile of an expert and behind all experts, are padding.

    experts: [T, k] int32, descending in s + bias, the lower expert first among equals.
    weights: [T, k] fp32, p above; differentiable with respect to the logits.
    cutoff: [T] fp32, the (k+1)-th largest s + bias, -inf where k = E (alpha of quantile balancing).
    counts: [E] int32, tokens of each expert.
    offsets: [E + 1] int32, first row of each expert; the last is the number of rows in use, with
        padding inside experts.
    row_of_slot: [T, k] int32, the row of each slot.
    token_of_row: [R] int32, the token of each row, -1 for padding.
    expert_of_tile: [R / tile_rows] int32, the expert of each tile, -1 for tiles not in use.
    """

    experts: torch.Tensor
    weights: torch.Tensor
    cutoff: torch.Tensor
    counts: torch.Tensor
    offsets: torch.Tensor
    row_of_slot: torch.Tensor
    token_of_row: torch.Tensor
    expert_of_tile: torch.Tensor


def padded_rows(tokens: int, experts: int, topk: int, tile_rows: int) -> int:
    """Rows that suffice for any routing: slots and, per expert in use, up to tile_rows - 1 more."""
    slots = tokens * topk
    return (slots + min(experts, slots) * (tile_rows - 1)) // tile_rows * tile_rows


def moe_route_reference(
    logits: torch.Tensor,
    bias: torch.Tensor | None = None,
    topk: int = 16,
    *,
    input: str = "logits",
    tile_rows: int = 64,
    scale: float = 1.0,
) -> Routing:
    """`moe_route` in plain torch, in fp32 or, for fp64 arguments, in fp64."""
    tokens, experts = logits.shape
    x = logits if logits.dtype == torch.float64 else logits.float()
    s = torch.sigmoid(x) if input == "logits" else x
    biased = s.detach() if bias is None else s.detach() + bias
    values, order = biased.sort(dim=-1, descending=True, stable=True)
    chosen = order[:, :topk]
    cutoff = values[:, topk] if topk < experts else values.new_full((tokens,), -float("inf"))
    picked = s.gather(-1, chosen)
    weights = scale * picked / (picked.sum(-1, keepdim=True) + EPS)

    counts = torch.bincount(chosen.reshape(-1), minlength=experts)
    tiles = (counts + tile_rows - 1) // tile_rows
    offsets = torch.cat([tiles.new_zeros(1), tiles.cumsum(0) * tile_rows])
    by_expert = chosen.reshape(-1).argsort(stable=True)
    expert = chosen.reshape(-1)[by_expert]
    rank = torch.arange(expert.numel(), device=expert.device) - (counts.cumsum(0) - counts)[expert]
    row = torch.empty_like(expert)
    row[by_expert] = offsets[expert] + rank
    rows = padded_rows(tokens, experts, topk, tile_rows)
    token_of_row = row.new_full((rows,), -1)
    token_of_row[row] = torch.arange(expert.numel(), device=expert.device) // topk
    owner = torch.repeat_interleave(torch.arange(experts, device=expert.device), tiles)
    expert_of_tile = row.new_full((rows // tile_rows,), -1)
    expert_of_tile[: owner.numel()] = owner
    integers = (counts, offsets, row.view(tokens, topk), token_of_row, expert_of_tile)
    return Routing(chosen.int(), weights, cutoff, *(x.int() for x in integers))
