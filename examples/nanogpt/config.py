"""The configurations that can be trained, by name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """Sizes of a model and how it is trained; nanoGPT's defaults for its Shakespeare run."""

    layers: int
    heads: int
    width: int
    context: int
    batch: int
    dropout: float
    steps: int
    learning_rate: float
    warmup: int
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.1
    max_norm: float = 1.0
    biases: bool = False
    vocabulary: int = 0  # 0: as many as the tokeniser has; larger: columns that no token uses
    eval_every: int = 250
    eval_batches: int = 50

    def padded(self, tokens: int) -> int:
        """Rows of the embedding: a multiple of 64, at least `vocabulary`."""
        return -(-max(tokens, self.vocabulary) // 64) * 64

    @property
    def sites(self) -> int:
        """Places that draw a dropout mask: the embedding, and three in every layer."""
        return 1 + 3 * self.layers


CONFIGS = {
    "shakespeare": Config(
        layers=6, heads=6, width=384, context=256, batch=64, dropout=0.2, steps=5000,
        learning_rate=1e-3, warmup=100,
    ),
    "124m-shape": Config(
        layers=12, heads=12, width=768, context=1024, batch=12, dropout=0.0, steps=600_000,
        learning_rate=6e-4, warmup=2000, betas=(0.9, 0.95), vocabulary=50_304,
    ),
    "small": Config(
        layers=4, heads=4, width=128, context=64, batch=12, dropout=0.0, steps=2000,
        learning_rate=1e-3, warmup=100, eval_batches=20,
    ),
    "tiny": Config(
        layers=2, heads=2, width=64, context=32, batch=4, dropout=0.1, steps=20,
        learning_rate=1e-3, warmup=5, eval_every=10, eval_batches=2,
    ),
}  # fmt: skip
