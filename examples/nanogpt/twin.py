"""The same model on torch's own kernels: what the runs are compared with.

Same parameters under the same names, same order of random draws at initialisation. With
`same_masks` dropout uses the masks of our kernels, drawn by their plain torch twins from the same
seeds; without, torch's own dropout, which is what a fair race needs. The bf16 tier is autocast, as
in nanoGPT.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch.nn import functional as F

from examples.nanogpt.masks import attention_mask, element_mask
from examples.nanogpt.model import GPT, LanguageModel, Matrix, Norm


class ClippedAdamW:
    """torch's AdamW after its clipping of the norm of all gradients."""

    def __init__(self, model: LanguageModel, groups: list[dict[str, Any]]) -> None:
        self.params = [p for group in groups for p in group["params"]]
        self.max_norm = model.config.max_norm
        fused = model.device.type == "cuda"
        self.adamw = torch.optim.AdamW(groups, lr=0.0, betas=model.config.betas, fused=fused)

    def set_lr(self, lr: float) -> None:
        for group in self.adamw.param_groups:
            group["lr"] = lr

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.adamw.zero_grad(set_to_none)

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.params, self.max_norm)
        self.adamw.step()

    def state_dict(self) -> dict[str, Any]:
        return self.adamw.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adamw.load_state_dict(state)


class Twin(GPT):
    """`GPT` computed by torch; in the tf32 tier, set torch.backends.cuda.matmul.allow_tf32."""

    same_masks = False

    def make_optimizer(self) -> ClippedAdamW:  # type: ignore[override]
        return ClippedAdamW(self, self.decay_groups())

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy, as `GPT.forward`."""
        with self._autocast():
            logits = self.logits(ids)[..., : self.tokens]
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten().long())

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """As `GPT.logits`."""
        seeds = self.seeds[:, :1].unbind(0)
        x = F.embedding(ids.long(), self.embedding.weight) + self.positions[: ids.shape[-1]]
        x = self._dropout(x, seeds[0])
        for i, layer in enumerate(self.layers):
            mixed = self._attention(_linear(_norm(x, layer.norm1), layer.qkv), seeds[3 * i + 1])
            x = x + self._dropout(_linear(mixed, layer.proj), seeds[3 * i + 2])
            inner = F.gelu(_linear(_norm(x, layer.norm2), layer.up))
            x = x + self._dropout(_linear(inner, layer.down), seeds[3 * i + 3])
        return F.linear(_norm(x, self.norm), self.embedding.weight)

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self.tier != "bf16":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def _dropout(self, x: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        p = self.config.dropout
        if not self.training or p == 0:
            return x
        if not self.same_masks:
            return F.dropout(x, p)
        keep = draw(element_mask, seed, x[..., 0].numel(), x.shape[-1], p)
        return torch.where(keep.view(x.shape), x / (1 - p), 0.0)

    def _attention(self, qkv: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        batch, length, _ = qkv.shape
        heads, p = self.config.heads, self.config.dropout if self.training else 0.0
        q, k, v = (x.transpose(1, 2) for x in qkv.view(batch, length, 3, heads, -1).unbind(2))
        if p and self.same_masks:
            scores = (q @ k.mT) * q.shape[-1] ** -0.5
            later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
            shares = scores.masked_fill(later, -float("inf")).softmax(-1)
            keep = draw(attention_mask, seed, batch * heads, length, length, p)
            out = (shares * keep.view(scores.shape) / (1 - p)).to(v.dtype) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return out.transpose(1, 2).flatten(2)


def draw(mask: Any, seed: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """What a function of `masks` draws; on a GPU as one kernel."""
    if seed.is_cuda and not torch.compiler.is_compiling():
        mask = _compiled(mask)
    return mask(seed, *arguments)


@functools.cache
def _compiled(mask: Any) -> Any:
    return torch.compile(mask, dynamic=False)


def _norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias)


def _linear(x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    return F.linear(x, matrix.weight, matrix.bias)
