"""A language model of K3's parts: KDA and gated MLA three to one, AttnRes, SiTU-GLU, LatentMoE.

The layers are those of `examples.k3`; embedding and head are tied. Muon per head trains the
projections that make queries, keys and values, AdamW the rest. Quantile balancing moves the
router's biases once per step, from counts of all parts of the batch and all processes. All of it is
kernels of `minitriton.kernels`, but for sums where two gradients meet and the routers' sigmoid for
the counts, which autograd and torch compute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from examples.k3.layers import KDA, GatedMLA, LatentMoE
from examples.k3.model import Stack
from examples.k3.reference import stack_reference
from examples.nanogpt.config import Config
from examples.nanogpt.model import LanguageModel
from examples.nanogpt.twin import ClippedAdamW
from minitriton.kernels.adamw import AdamW
from minitriton.kernels.embedding import tied_embedding
from minitriton.kernels.linear import linear
from minitriton.kernels.muon import PerHeadMuon, muon_step_reference
from minitriton.kernels.quantile_balancing import quantile_bias_from_histogram, quantile_histogram

BINS = 1000  # of the balancing histogram, as K3 has
NOT_MATRICES = ("queries", "key_norms", "in_norms")  # rows of vectors: no weight decay
INTO_STREAM = ("out", "down", "latent_up")


class TwoOptimizers:
    """Muon and AdamW as one optimizer; lr: what Muon's groups hold, on the device."""

    def __init__(self, muon: Any, adamw: Any, lr: torch.Tensor) -> None:
        self.muon, self.adamw, self.lr = muon, adamw, lr

    def set_lr(self, lr: float) -> None:
        self.lr.copy_(torch.tensor([lr]))
        self.adamw.set_lr(lr)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.muon.zero_grad(set_to_none)
        self.adamw.zero_grad(set_to_none)

    def step(self) -> None:
        self.muon.step()
        self.adamw.step()

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.muon.load_state_dict(state["muon"])
        self.adamw.load_state_dict(state["adamw"])
        for group in self.muon.param_groups:
            group["lr"] = self.lr


class ReferenceMuon(torch.optim.Optimizer):
    """`PerHeadMuon` in plain torch, for parameter groups with "heads"."""

    def __init__(self, groups: list[dict[str, Any]], lr: torch.Tensor, weight_decay: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                buffer = state.get("momentum_buffer", torch.zeros_like(p))
                weight, state["momentum_buffer"] = muon_step_reference(
                    p, p.grad, buffer, group["lr"], heads=group["heads"],
                    weight_decay=group["weight_decay"],
                )  # fmt: skip
                p.copy_(weight)


class K3(LanguageModel):
    """The model, see `LanguageModel`; the tier must be "fp32"."""

    def __init__(self, config: Config, tokens: int, tier: str = "fp32") -> None:
        super().__init__(config, tokens, tier)
        if config.k3 is None or tier != "fp32" or config.k3.width != config.width:
            raise ValueError(f"a K3 model needs K3 sizes of width {config.width} and tier fp32")
        self.stack = Stack(config.k3)
        for name, p in self.stack.named_parameters():
            if p.dim() >= 2 and self._decays(name):
                into = name.rsplit(".", 1)[-1] in INTO_STREAM
                torch.nn.init.normal_(p, 0.0, 0.02 / (4 * config.layers) ** 0.5 if into else 0.02)
        torch.nn.init.zeros_(self.stack.queries)  # at first all blocks count alike
        self.register_buffer(
            "counts", torch.zeros(len(self._routed()), config.k3.experts, BINS, dtype=torch.int32)
        )

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """See `LanguageModel`; there are no positions, so any length will do."""
        x, head = tied_embedding(ids, self.embedding.weight)
        return linear(self.stack(x), head)

    def make_optimizer(self) -> TwoOptimizers:
        config, lr = self.config, torch.zeros(1, device=self.device)
        projections, others = self._groups()
        decay = config.weight_decay
        muon = PerHeadMuon(projections, lr, weight_decay=decay, precision="tf32x3")
        adamw = AdamW(others, lr=0.0, betas=config.betas, max_norm=config.max_norm)
        return TwoOptimizers(muon, adamw, lr)

    @torch.no_grad()
    def after_backward(self) -> None:
        """Counts, of every expert, by how much tokens missed or reached it."""
        for feed, counts in zip(self._routed(), self.counts, strict=True):
            assert feed.logits is not None and feed.routing is not None
            scores = torch.sigmoid(feed.logits)
            quantile_histogram(scores, feed.routing.cutoff, feed.bias, counts)

    @torch.no_grad()
    def after_step(self) -> None:
        """Moves the router's biases, once."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(self.counts)
        for feed, counts in zip(self._routed(), self.counts, strict=True):
            feed.bias.copy_(quantile_bias_from_histogram(counts, feed.bias, feed.config.topk))
        self.counts.zero_()

    def _routed(self) -> list[LatentMoE]:
        return [feed for feed in self.stack.feeds if isinstance(feed, LatentMoE)]

    @staticmethod
    def _decays(name: str) -> bool:
        return name.rsplit(".", 1)[-1] not in NOT_MATRICES

    def _groups(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Parameter groups for Muon, with their heads, and for AdamW."""
        projections: list[dict[str, Any]] = []
        for mixer in self.stack.mixers:
            if isinstance(mixer, KDA):
                projections.append({"params": [mixer.qkv], "heads": 3 * mixer.heads})
            elif isinstance(mixer, GatedMLA):
                up = [mixer.q_up, mixer.kv_up]
                projections.append({"params": up, "heads": mixer.config.heads})
        taken = {id(p) for group in projections for p in group["params"]}
        rest = [(n, p) for n, p in self.named_parameters() if id(p) not in taken]
        matrices = [p for n, p in rest if p.dim() >= 2 and self._decays(n)]
        vectors = [p for n, p in rest if p.dim() < 2 or not self._decays(n)]
        others = [
            {"params": matrices, "weight_decay": self.config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return projections, others


class K3Twin(K3):
    """`K3` computed by torch. The balancing counts are taken by the same kernels: they choose
    experts and have no gradient."""

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """As `K3.forward`."""
        logits = self.logits(ids)[..., : self.tokens]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten().long())

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """As `K3.logits`."""
        x = F.embedding(ids.long(), self.embedding.weight)
        return F.linear(stack_reference(self.stack, x), self.embedding.weight)

    def make_optimizer(self) -> TwoOptimizers:
        lr = torch.zeros(1, device=self.device)
        projections, others = self._groups()
        muon = ReferenceMuon(projections, lr, self.config.weight_decay)
        return TwoOptimizers(muon, ClippedAdamW(self, others), lr)
