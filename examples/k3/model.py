"""The stack: AttnRes reads in front of every sub-layer, and the caches of all layers."""

from __future__ import annotations

import torch
from torch import nn

from examples.k3.layers import KDA, Config, DenseFF, GatedMLA, KDACache, LatentMoE, MLACache
from minitriton.kernels.attn_res_schedule import BlockAttnRes

Cache = KDACache | MLACache


class Stack(nn.Module):
    """Decoder layers of `config`: embeddings in, normed hidden states out, both [B, T, width]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.mixers = nn.ModuleList(
            GatedMLA(config) if config.is_mla(i) else KDA(config) for i in range(config.layers)
        )
        self.feeds = nn.ModuleList(
            LatentMoE(config) if i else DenseFF(config.width, config.dense_ff)
            for i in range(config.layers)
        )
        reads = 2 * config.layers + 1
        self.queries = nn.Parameter(torch.randn(reads, config.width) * 0.3)
        self.key_norms = nn.Parameter(torch.ones(reads, config.width))
        self.in_norms = nn.Parameter(torch.ones(reads, config.width))

    def new_caches(self, batch: int, tokens: int) -> list[Cache]:
        """Caches of all layers for sequences that may grow to so many tokens."""
        return [
            m.new_cache(batch, tokens) if isinstance(m, GatedMLA) else m.new_cache(batch)
            for m in self.mixers
        ]

    def forward(self, x: torch.Tensor, caches: list[Cache] | None = None) -> torch.Tensor:
        """Whole sequences; new caches, if given, are left after the last token."""
        given: list[Cache | None] = [None] * len(self.mixers) if caches is None else [*caches]
        return self._run(x, [(m, c) for m, c in zip(self.mixers, given, strict=True)], False)

    @torch.no_grad()
    def step(self, x: torch.Tensor, caches: list[Cache]) -> torch.Tensor:
        """[B, 1, width]: the next token of every sequence."""
        return self._run(x, list(zip(self.mixers, caches, strict=True)), True)

    def _run(self, x: torch.Tensor, mixers: list, one: bool) -> torch.Tensor:
        reads = BlockAttnRes(
            x, self.queries, self.key_norms, sub_layers_per_block=2 * self.config.block
        )
        norms = iter(self.in_norms.unbind(0))
        y = None
        for (mixer, cache), feed in zip(mixers, self.feeds, strict=True):
            h = reads.next(y, out_weight=next(norms))
            y = mixer.step(h, cache) if one else mixer(h, cache)
            y = feed(reads.next(y, out_weight=next(norms)))
        return reads.next(y, out_weight=next(norms))
