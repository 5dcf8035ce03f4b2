"""Chunk tables of KDA: which tokens each chunk of 64 holds, per sequence.

The passes see B x T tokens in a row. Without `cu_seqlens` every batch entry is a sequence. Tables
are made on the host and kept for the lengths seen last; a CUDA graph may hold on to them.
"""

from __future__ import annotations

import functools
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from minitriton.kernels.packing import check_bounds

CHUNK = 64


class Chunks(NamedTuple):
    """chunk: int32 [NC, 3], (sequence, first token of B x T, rows 1 to 64), those of one sequence
    together; sequence: int32 [N, 2], (first chunk, chunk count). On the device of the inputs.
    """

    chunk: torch.Tensor
    sequence: torch.Tensor


def chunks_of(batch: int, tokens: int, ends: torch.Tensor | None, device: torch.device) -> Chunks:
    """The tables for [batch, tokens] or, with `ends` = cu_seqlens, for packed sequences.

    Reads `ends` on the host, which waits for the device where it lies on one, and checks it:
    KernelArgumentError unless it rises from 0 to `tokens`.
    """
    bounds = tuple(i * tokens for i in range(batch + 1)) if ends is None else tuple(ends.tolist())
    if ends is not None:
        check_bounds(bounds, tokens)
    return _tables(bounds, device)


@functools.lru_cache(maxsize=64)
def _tables(bounds: tuple[int, ...], device: torch.device) -> Chunks:
    chunk = [
        (sequence, token, min(CHUNK, end - token))
        for sequence, (start, end) in enumerate(pairwise(bounds))
        for token in range(start, end, CHUNK)
    ]
    counts = [-(-(end - start) // CHUNK) for start, end in pairwise(bounds)]
    sequence = list(zip(accumulate(counts, initial=0), counts, strict=False))
    return Chunks(
        torch.tensor(chunk, dtype=torch.int32).view(-1, 3).to(device),
        torch.tensor(sequence, dtype=torch.int32).view(-1, 2).to(device),
    )
