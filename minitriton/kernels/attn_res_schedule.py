"""Block AttnRes over a stack of layers: which sources each sub-layer reads, as plain bookkeeping.

A bank holds the embedding and the sums of finished blocks; a prefix runs over the block at work:

    h = mix(bank + [prefix])                   before every sub-layer, and once at the end
    first sub-layer of a block: the bank takes the prefix, which starts anew with its output
    any other: prefix += its output            (fused into the next mix)

Source: Kimi K3 technical report, section 2.2, eq. 10, in its streaming form. There is no other
residual connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from minitriton.kernels import checks
from minitriton.kernels.attn_res import attn_res_mix
from minitriton.kernels.attn_res_phases import attn_res_merge, attn_res_phase1
from minitriton.kernels.checks import KernelArgumentError


class BlockAttnRes:
    """The reads of S sub-layers and the final one, in order.

        reads, y = BlockAttnRes(embedding, queries, norm_weights), None
        for sub_layer, norm in zip(sub_layers, norms):
            y = sub_layer(reads.next(y, out_weight=norm))
        out = reads.next(y, out_weight=final_norm)

    embedding: [..., d], fp32, bf16 or fp16, d <= 8192; queries, norm_weights: S + 1 vectors [d]
    each, as a sequence or a tensor [S + 1, d]; sub_layers_per_block: 24 in K3, 12 layers of two.
    two_phase: the reads of a block meet its bank at once, in `attn_res_phase1`; for inference,
    queries and norm_weights being tensors, sub_layers_per_block <= 32. Up to 16 blocks.
    """

    def __init__(
        self,
        embedding: torch.Tensor,
        queries: torch.Tensor | Sequence[torch.Tensor],
        norm_weights: torch.Tensor | Sequence[torch.Tensor],
        *,
        sub_layers_per_block: int = 24,
        eps: float = 1e-5,
        two_phase: bool = False,
    ) -> None:
        checks.float_tensor("embedding", embedding)
        if len(queries) != len(norm_weights) or len(queries) == 0:
            raise KernelArgumentError(
                f"argument 'norm_weights': {len(norm_weights)} vectors for {len(queries)} queries; "
                "there must be one each, for every sub-layer and for the final read"
            )
        if sub_layers_per_block < 1:
            raise KernelArgumentError(
                f"argument 'sub_layers_per_block': must be at least 1, got {sub_layers_per_block}"
            )
        self.bank: list[torch.Tensor] = []
        self.prefix: torch.Tensor | None = embedding
        self.done = 0  # reads so far
        self._queries, self._norm_weights, self._eps = queries, norm_weights, eps
        self._per_block, self._two_phase = sub_layers_per_block, two_phase
        self._answers: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def next(
        self, y: torch.Tensor | None = None, *, out_weight: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Input of the next sub-layer, or the final output: [..., d] like the embedding.

        y: output of the sub-layer before, None in front of the first. out_weight: weight [d] of an
        RMS norm of the result. KernelArgumentError if y is missing, not expected or does not fit,
        and after the final read.
        """
        i, last = self.done, len(self._queries) - 1
        if i > last or (y is None) != (i == 0):
            expected = (
                "no read is left" if i > last else "None in front of the first sub-layer only"
            )
            raise KernelArgumentError(f"argument 'y': read {i} of {last + 1}; {expected}")
        delta = None if self.prefix is None else y
        source = y if self.prefix is None else self.prefix
        mixed = self._read(i, source, delta, out_weight)
        h, self.prefix = mixed if delta is not None else (mixed, source)
        self.done += 1
        if i % self._per_block == 0 and i < last:
            self.bank.append(self.prefix)
            self.prefix = None
            if self._two_phase:
                block = slice(i + 1, i + 1 + self._per_block)
                self._answers = attn_res_phase1(
                    self.bank, self._queries[block], self._norm_weights[block], self._eps
                )
        return h

    def _read(
        self, i: int, source: Any, delta: torch.Tensor | None, out_weight: torch.Tensor | None
    ) -> Any:
        query, weight = self._queries[i], self._norm_weights[i]
        options: dict[str, Any] = {"delta": delta, "out_weight": out_weight}
        if self._answers is None:
            return attn_res_mix([*self.bank, source], query, weight, self._eps, **options)
        m, total, acc = (part[(i - 1) % self._per_block] for part in self._answers)
        return attn_res_merge(m, total, acc, source, query, weight, self._eps, **options)
