"""The dropout masks of our kernels in plain torch, on any device: four words of Philox a call.

`minitriton.kernels` has slower twins for tests, one call for each element; these serve whole runs
of the torch twin with the same masks, and torch.compile makes one kernel of each on a GPU.
"""

from __future__ import annotations

import torch

from minitriton.kernels.philox import philox_words, threshold_of


def element_mask(seed: torch.Tensor, rows: int, columns: int, probability: float) -> torch.Tensor:
    """What `dropout` keeps of a matrix, [rows, columns]; seed: int64 [1]."""
    row = torch.arange(rows, device=seed.device)[:, None]
    group = torch.arange(-(-columns // 4), device=seed.device)[None, :]
    words = philox_words(seed, [group, row, row * 0, row * 0])
    return words.permute(1, 2, 0).flatten(1)[:, :columns] >= threshold_of(probability)


def attention_mask(
    seed: torch.Tensor, planes: int, queries: int, keys: int, probability: float
) -> torch.Tensor:
    """What `attention` keeps, [planes, queries, keys], planes = batch * heads; seed: int64 [1]."""
    across, down = -(-keys // 16), -(-queries // 16)  # tiles of 16 x 16 are 8 x 8 calls
    row = torch.arange(8 * down, device=seed.device)[:, None]
    column = torch.arange(8 * across, device=seed.device)[None, :]
    plane = torch.arange(planes, device=seed.device)[:, None, None]
    words = philox_words(seed, [row, column, plane, plane * 0])
    parts = words.view(2, 2, planes, down, 8, across, 8).permute(2, 3, 0, 4, 5, 1, 6)
    whole = parts.reshape(planes, 16 * down, 16 * across)
    return whole[:, :queries, :keys] >= threshold_of(probability)
