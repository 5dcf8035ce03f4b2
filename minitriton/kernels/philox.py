"""The plain torch twin of the language's Philox 4x32-10, by which masks of dropout are checked."""

from __future__ import annotations

import torch

WORD = 2**32


def philox_words(seed: int | torch.Tensor, counters: list[torch.Tensor]) -> torch.Tensor:
    """Four 32-bit words per counter, stacked in front, as int64.

    seed: 64 bits, a number or an int64 tensor of one element; counters: four int64 tensors that
    broadcast against each other. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2,
    3", SC 2011.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counters)
    low, high = seed % WORD, (seed // WORD) % WORD
    for _ in range(10):
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # modulo 2^64, the sign bit included
        c0, c1, c2, c3 = (
            (second >> 32) % WORD ^ c1 ^ low, second % WORD,
            (first >> 32) % WORD ^ c3 ^ high, first % WORD,
        )  # fmt: skip
        low, high = (low + 0x9E3779B9) % WORD, (high + 0xBB67AE85) % WORD
    return torch.stack([c0, c1, c2, c3])


def threshold_of(probability: float) -> int:
    """The number below which a word drops its element."""
    return min(WORD - 1, round(probability * WORD))
