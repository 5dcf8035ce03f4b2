"""The dropout masks of our kernels in plain torch, on any device: four words of Philox a call.

`minitriton.kernels` has slower twins for tests, one call for each element; these serve whole runs
of the torch twin with the same masks, and torch.compile makes one kernel of each on a GPU.
"""

from __future__ import annotations

import torch

from minitriton.kernels.philox import philox_words, threshold_of


def element_mask(seed: torch.Tensor, rows: int, columns: int, probability: float) -> torch.Tensor:
    """What `dropout` keeps of a matrix, [rows, columns]; seed: int64 [1]."""
    row, group = _counters(seed, rows, -(-columns // 4))
    row, group = row[:, None], group[None, :]
    words = philox_words(seed, [group, row, row * 0, row * 0])
    return words.permute(1, 2, 0).flatten(1)[:, :columns] >= threshold_of(probability)


@torch.compiler.disable  # Inductor would multiply them in 32 bits
def _counters(seed: torch.Tensor, *sizes: int) -> list[torch.Tensor]:
    return [torch.arange(size, device=seed.device) for size in sizes]


def attention_mask(
    seed: torch.Tensor, planes: int, queries: int, keys: int, probability: float
) -> torch.Tensor:
    """What `attention` keeps, [planes, queries, keys], planes = batch * heads; seed: int64 [1]."""
    across, down = -(-keys // 16), -(-queries // 16)  # tiles of 16 x 16 are 8 x 8 calls
    row, column, plane = _counters(seed, 8 * down, 8 * across, planes)
    row, column, plane = row[:, None], column[None, :], plane[:, None, None]
    words = philox_words(seed, [row, column, plane, plane * 0])
    parts = words.view(2, 2, planes, down, 8, across, 8).permute(2, 3, 0, 4, 5, 1, 6)
    whole = parts.reshape(planes, 16 * down, 16 * across)
    return whole[:, :queries, :keys] >= threshold_of(probability)
