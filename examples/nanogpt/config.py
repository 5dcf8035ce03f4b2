"""The configurations that can be trained, by name."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from examples.k3.layers import Config as K3Sizes


@dataclass(frozen=True)
class Config:
    """Sizes of a model and how it is trained; nanoGPT's defaults for its Shakespeare run."""

    layers: int
    heads: int
    width: int
    context: int
    batch: int  # windows in a step, of all processes together
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
    accumulate: int = 1  # parts into which every process cuts its share of a batch
    by_byte: bool = False  # tokens are bytes, not characters
    in_emulator: bool = False  # small enough to be trained without a GPU
    k3: K3Sizes | None = None  # layers of K3 in place of GPT's

    def padded(self, tokens: int) -> int:
        """Rows of the embedding: a multiple of 64, at least `vocabulary`."""
        return -(-max(tokens, self.vocabulary) // 64) * 64

    @property
    def sites(self) -> int:
        """Places that draw a dropout mask: the embedding, and three in every layer."""
        return 1 + 3 * self.layers

    def flat(self) -> dict[str, Any]:
        """Every number by name, as checkpoints keep them."""
        numbers = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}
        sizes = {} if self.k3 is None else dataclasses.asdict(self.k3)
        return numbers | {"k3": None} | {f"k3.{name}": n for name, n in sizes.items()}


TINY = Config(
    layers=2, heads=2, width=64, context=32, batch=2, dropout=0.1, steps=20, learning_rate=1e-3,
    warmup=5, eval_every=10, eval_batches=2, in_emulator=True,
)  # fmt: skip
SHAKESPEARE = Config(
    layers=6, heads=6, width=384, context=256, batch=64, dropout=0.2, steps=5000,
    learning_rate=1e-3, warmup=100,
)  # fmt: skip
CONFIGS = {
    "shakespeare": SHAKESPEARE,
    "124m-shape": Config(
        layers=12, heads=12, width=768, context=1024, batch=12, dropout=0.0, steps=600_000,
        learning_rate=6e-4, warmup=2000, betas=(0.9, 0.95), vocabulary=50_304, by_byte=True,
    ),
    "k3": dataclasses.replace(
        SHAKESPEARE, layers=8, dropout=0.0,
        k3=K3Sizes(
            width=384, layers=8, block=2, heads=6, head=64, decay_rank=64, q_rank=192, kv_rank=128,
            nope=64, shared=32, value=64, experts=16, topk=2, latent=192, expert_ff=192,
            shared_ff=384, dense_ff=1024,
        ),
    ),
    "small": Config(
        layers=4, heads=4, width=128, context=64, batch=12, dropout=0.0, steps=2000,
        learning_rate=1e-3, warmup=100, eval_batches=20, in_emulator=True,
    ),
    "tiny": TINY,
    "k3-tiny": dataclasses.replace(TINY, layers=4, dropout=0.0, steps=10, k3=K3Sizes()),
}  # fmt: skip
