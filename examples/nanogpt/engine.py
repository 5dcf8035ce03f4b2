"""One training step, on MiniTriton's kernels or on torch's."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch

import minitriton as triton
import minitriton.language as tl
from examples.nanogpt.config import Config
from examples.nanogpt.data import windows
from examples.nanogpt.model import GPT
from examples.nanogpt.twin import Twin
from minitriton.kernels.adamw import AdamW

WARM_STEPS = 3  # before a graph is captured


class Engine(Protocol):
    """What the training loop asks of an engine."""

    model: GPT

    def step(self, tokens: torch.Tensor, first: torch.Tensor, learning_rate: float) -> torch.Tensor:
        """One step on the windows of `tokens` that begin at `first` (int64 [batch], on the CPU);
        the loss before the step, a scalar on the device that the next step overwrites."""

    def state_dict(self) -> dict[str, Any]:
        """Weights, moments, dropout seeds."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from such a state."""


@triton.jit
def _advance_kernel(seeds_ptr, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    seeds = tl.load(seeds_ptr + at, mask=at < count)
    tl.store(seeds_ptr + at, seeds + count, mask=at < count)


def advance(seeds: torch.Tensor) -> None:
    """Moves dropout seeds on, so that every site of every step has its own."""
    count = seeds.numel()
    _advance_kernel[(1,)](seeds, count, BLOCK=max(32, triton.next_power_of_2(count)))


def first_seeds(config: Config, seed: int, rank: int = 0) -> torch.Tensor:
    """Dropout seeds before the first step, int64 [sites]."""
    return torch.arange(config.sites) + (1 + seed) * 2**40 + rank * 2**36


def learning_rate(config: Config, step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth at the last step."""
    if step < config.warmup:
        return config.learning_rate * (step + 1) / (config.warmup + 1)
    share = (step - config.warmup) / max(1, config.steps - config.warmup)
    low = config.learning_rate / 10
    return low + (config.learning_rate - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))


class MiniTritonEngine:
    """All device work by our kernels; on a GPU one CUDA graph replays the whole step.

    model: on its device, in training mode. `wrap` may put it into DistributedDataParallel, whose
    communication keeps steps out of a graph.
    """

    def __init__(self, model: GPT, batch: int, *, graph: bool, wrap: Any = None) -> None:
        config, device = model.config, model.positions.device
        self.model = model
        self.optimizer = AdamW(
            model.decay_groups(config.weight_decay), lr=0.0, betas=config.betas,
            max_norm=config.max_norm, low=None if model.tier != "bf16" else torch.bfloat16,
        )  # fmt: skip
        if model.tier == "bf16":
            for matrix in model.matrices():
                matrix.low = self.optimizer.low_of(matrix.weight)
        self._call = model if wrap is None else wrap(model)
        self._graph = torch.cuda.CUDAGraph() if graph else None
        self._steps = 0
        self._first = torch.zeros(batch, dtype=torch.int64, device=device)
        self._ids, self._targets = (
            torch.zeros(batch, config.context, dtype=torch.int32, device=device) for _ in range(2)
        )
        self._one = torch.ones((), device=device)
        self._loss = torch.zeros((), device=device)

    def step(self, tokens: torch.Tensor, first: torch.Tensor, learning_rate: float) -> torch.Tensor:
        """See `Engine`."""
        self._first.copy_(first)
        self.optimizer.set_lr(learning_rate)
        if self._graph is None or self._steps < WARM_STEPS:
            self._work(tokens)
        elif self._steps == WARM_STEPS:
            self._capture(tokens)
            self._graph.replay()
        else:
            self._graph.replay()
        self._steps += 1
        return self._loss

    def _work(self, tokens: torch.Tensor) -> None:
        windows(tokens, self._first, self._ids, self._targets)
        advance(self.model.seeds)
        self.optimizer.zero_grad(set_to_none=True)
        self._loss = self._call(self._ids, self._targets)
        self._loss.backward(self._one)
        self.optimizer.step()

    def _capture(self, tokens: torch.Tensor) -> None:
        assert self._graph is not None
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph):
            self._work(tokens)

    def state_dict(self) -> dict[str, Any]:
        """See `Engine`."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Engine`."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.optimizer.refresh_low()


class TorchEngine:
    """The twin on torch's kernels: "eager", "compile", or "compile-graphs" (reduce-overhead)."""

    def __init__(self, model: Twin, batch: int, mode: str = "eager") -> None:
        config, device = model.config, model.positions.device
        self.model = model
        cuda = device.type == "cuda"
        torch.backends.cuda.matmul.allow_tf32 = model.tier == "tf32"
        self.optimizer = torch.optim.AdamW(
            model.decay_groups(config.weight_decay), lr=0.0, betas=config.betas, fused=cuda
        )
        options = {"mode": "reduce-overhead"} if mode == "compile-graphs" else {}
        self._call = model if mode == "eager" else torch.compile(model, dynamic=False, **options)
        self._window = torch.arange(config.context + 1, device=device)

    def step(self, tokens: torch.Tensor, first: torch.Tensor, learning_rate: float) -> torch.Tensor:
        """See `Engine`."""
        both = tokens[first.to(tokens.device)[:, None] + self._window].long()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.model.seeds += self.model.seeds.numel()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._call(both[:, :-1], both[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.model.config.max_norm)
        self.optimizer.step()
        return loss.detach()

    def state_dict(self) -> dict[str, Any]:
        """See `Engine`."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Engine`."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


@torch.no_grad()
def evaluate(model: GPT, tokens: torch.Tensor, batches: int, batch: int) -> float:
    """Mean loss over windows that lie evenly in `tokens`, the same ones at every call."""
    context = model.config.context
    ids, targets = (
        torch.zeros(batch, context, dtype=torch.int32, device=tokens.device) for _ in range(2)
    )
    room = len(tokens) - context
    firsts = torch.arange(batches * batch, device=tokens.device) * room // (batches * batch)
    model.eval()
    losses = []
    for first in firsts.view(batches, batch):
        windows(tokens, first, ids, targets)
        losses.append(model(ids, targets))
    model.train()
    return torch.stack(losses).mean().item()
