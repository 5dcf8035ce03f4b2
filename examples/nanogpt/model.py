"""The model: pre-LN transformer, exact GELU, tied token embedding and head.

Every operation on the device, forward and backward, is a kernel of `minitriton.kernels`; autograd
only orders them. Each activation has one use: where two paths meet (residual sums, the tied
embedding), one kernel adds both gradients, so that autograd has nothing to add by itself. The
residual stream is fp32; in the bf16 tier the branches and the factors of matrix products are bf16,
with fp32 masters.
"""

from __future__ import annotations

import abc
from typing import Any

import torch
from torch import nn

from examples.nanogpt.config import Config
from minitriton.kernels.adamw import AdamW
from minitriton.kernels.attention_packed import packed_attention
from minitriton.kernels.cross_entropy import cross_entropy
from minitriton.kernels.embedding import tied_embedding
from minitriton.kernels.layer_norm import add_layer_norm
from minitriton.kernels.linear import gelu_mlp, linear

PRECISIONS = {"fp32": "tf32x3", "ieee": "ieee", "tf32": "tf32", "bf16": "tf32x3"}  # by tier
TIERS = tuple(PRECISIONS)


class Norm(nn.Module):
    """Weight, and optionally bias, of a layer normalisation."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None


class Matrix(nn.Module):
    """Weight, and optionally bias, of a linear layer; `low` is a copy in another dtype."""

    def __init__(self, rows: int, columns: int, deviation: float, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns) * deviation)
        self.bias = nn.Parameter(torch.zeros(rows)) if bias else None
        self.low: torch.Tensor | None = None


class Layer(nn.Module):
    """Parameters of one transformer layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, bias = config.width, config.biases
        into_stream = 0.02 / (2 * config.layers) ** 0.5
        self.norm1, self.norm2 = Norm(width, bias), Norm(width, bias)
        self.qkv = Matrix(3 * width, width, 0.02, bias)
        self.proj = Matrix(width, width, into_stream, bias)
        self.up = Matrix(4 * width, width, 0.02, bias)
        self.down = Matrix(width, 4 * width, into_stream, bias)


class LanguageModel(nn.Module, abc.ABC):
    """What the models have in common. tokens: how many the tokeniser has; tier: "fp32" (three tf32
    products), "ieee" (no tensor cores), "tf32" or "bf16". Weights come from torch's global random
    generator, in one order for every tier."""

    seeds: torch.Tensor

    def __init__(self, config: Config, tokens: int, tier: str) -> None:
        super().__init__()
        if tier not in TIERS:
            raise ValueError(f"tier must be one of {', '.join(TIERS)}, got {tier!r}")
        self.config, self.tokens, self.tier = config, tokens, tier
        self.precision = PRECISIONS[tier]
        self.embedding = Matrix(config.padded(tokens), config.width, 0.02, bias=False)
        # the second column keeps seeds 16 bytes apart: kernels are compiled once for all of them
        self.register_buffer("seeds", torch.zeros(config.sites, 2, dtype=torch.int64))

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy: ids, targets [B, T] of integers; a scalar."""
        logits = self.logits(ids)
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), classes=self.tokens)

    @abc.abstractmethod
    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """[B, T, padded vocabulary]; columns from `tokens` on mean nothing."""

    def decay_groups(self) -> list[dict[str, Any]]:
        """Parameter groups: matrices decay, vectors do not."""
        return [
            {
                "params": [p for p in self.parameters() if (p.dim() >= 2) == decays],
                "weight_decay": self.config.weight_decay if decays else 0.0,
            }
            for decays in (True, False)
        ]

    @abc.abstractmethod
    def make_optimizer(self) -> Any:
        """An optimizer of all parameters, by our kernels; tells matrices of their copies."""

    def after_backward(self) -> None:
        """Called after every backward pass."""

    def after_step(self) -> None:
        """Called after every step of the optimizer."""


class GPT(LanguageModel):
    """The model, see `LanguageModel`."""

    def __init__(self, config: Config, tokens: int, tier: str = "bf16") -> None:
        super().__init__(config, tokens, tier)
        self.dtype = torch.bfloat16 if tier == "bf16" else torch.float32
        self.positions = nn.Parameter(torch.randn(config.context, config.width) * 0.02)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = Norm(config.width, config.biases)

    def make_optimizer(self) -> AdamW:
        config, low = self.config, None if self.dtype == torch.float32 else self.dtype
        groups = self.decay_groups()
        optimizer = AdamW(
            groups, lr=0.0, betas=config.betas, max_norm=config.max_norm, low=low
        )  # fmt: skip
        if low is not None:
            for matrix in (m for m in self.modules() if isinstance(m, Matrix)):
                matrix.low = optimizer.low_of(matrix.weight)
        return optimizer

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """See `LanguageModel`; ValueError for more tokens than there are positions."""
        config = self.config
        if ids.shape[-1] > config.context:
            raise ValueError(f"{ids.shape[-1]} tokens; the model's context is {config.context}")
        p = config.dropout if self.training else 0.0
        seeds = self.seeds[:, :1].unbind(0)
        stream, head = tied_embedding(
            ids, self.embedding.weight, self.positions, dropout=p, seed=seeds[0]
        )
        branch = None
        for i, layer in enumerate(self.layers):
            norms = layer.norm1, layer.norm2
            stream, x = self._add_norm(stream, branch, norms[0], p if i else 0.0, seeds[3 * i])
            qkv = self._linear(x, layer.qkv)
            mixed = packed_attention(
                qkv, config.heads, dropout=p, seed=seeds[3 * i + 1], precision=self.precision
            )
            branch = self._linear(mixed, layer.proj)
            stream, x = self._add_norm(stream, branch, norms[1], p, seeds[3 * i + 2])
            branch = gelu_mlp(
                x, layer.up.weight, layer.down.weight, layer.up.bias, layer.down.bias,
                low_up=layer.up.low, low_down=layer.down.low, precision=self.precision,
            )  # fmt: skip
        _, x = self._add_norm(stream, branch, self.norm, p, seeds[3 * config.layers])
        return linear(x, head, low=self.embedding.low, precision=self.precision)

    def _add_norm(
        self, stream: torch.Tensor, branch: torch.Tensor | None, norm: Norm, dropout: float,
        seed: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        return add_layer_norm(
            stream, branch, norm.weight, norm.bias, dropout=dropout, seed=seed,
            out_dtype=self.dtype,
        )  # fmt: skip

    def _linear(self, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        return linear(x, matrix.weight, matrix.bias, low=matrix.low, precision=self.precision)
