"""One training step, on MiniTriton's kernels or on torch's."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, Protocol

import torch

import minitriton as triton
import minitriton.language as tl
from examples.nanogpt.config import Config
from examples.nanogpt.data import windows
from examples.nanogpt.model import LanguageModel
from minitriton.kernels.gradient_sum import GradientSum

WARM_STEPS = 3  # before a graph is captured
Wrap = Callable[[torch.nn.Module], Any]


class Engine(Protocol):
    """What the training loop asks of an engine."""

    model: LanguageModel

    def step(self, tokens: torch.Tensor, first: torch.Tensor, learning_rate: float) -> torch.Tensor:
        """One step on the windows of `tokens` that begin at `first` (int64 [batch], on the CPU);
        the loss of each part of the batch before the step, [parts] on the device, which the next
        step may overwrite."""

    def state_dict(self) -> dict[str, Any]:
        """Weights, moments, dropout seeds."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from such a state."""


@triton.jit
def _advance_kernel(seeds_ptr, count, step, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    seeds = tl.load(seeds_ptr + at, mask=at < count)
    tl.store(seeds_ptr + at, seeds + step, mask=at < count)


def advance(seeds: torch.Tensor) -> None:
    """Moves dropout seeds on, so that every site of every forward pass has its own."""
    count, block = seeds.numel(), max(32, triton.next_power_of_2(seeds.numel()))
    _advance_kernel[(1,)](seeds, count, seeds.shape[0], BLOCK=block)


def first_seeds(config: Config, seed: int, rank: int = 0, done: int = 0) -> torch.Tensor:
    """Dropout seeds after `done` steps, int64 [sites, 1]."""
    passed = done * config.accumulate * config.sites
    return torch.arange(config.sites)[:, None] + (passed + (1 + seed) * 2**40 + rank * 2**36)


def learning_rate(config: Config, step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth at the last step."""
    if step < config.warmup:
        return config.learning_rate * (step + 1) / (config.warmup + 1)
    share = (step - config.warmup) / max(1, config.steps - config.warmup)
    low = config.learning_rate / 10
    return low + (config.learning_rate - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))


class MiniTritonEngine:
    """All device work by our kernels; on a GPU one CUDA graph replays the whole step.

    model: on its device, in training mode; batch: windows in a step of this process. `wrap` may put
    the model into DistributedDataParallel, whose communication keeps steps out of a graph. Where
    the batch is taken in parts, the processes exchange the sum of their gradients in one message.
    """

    def __init__(
        self, model: LanguageModel, batch: int, *, graph: bool, wrap: Wrap | None = None
    ) -> None:
        config, device = model.config, model.device
        self.model = model
        self.optimizer = model.make_optimizer()
        self._call = model if wrap is None else wrap(model)
        self._graph = torch.cuda.CUDAGraph() if graph else None
        self._steps, self._parts = 0, config.accumulate
        part = batch // self._parts
        self._first = torch.zeros(self._parts, part, dtype=torch.int64, device=device)
        self._ids, self._targets = (
            torch.zeros(part, config.context, dtype=torch.int32, device=device) for _ in range(2)
        )
        self._losses = torch.zeros(self._parts, device=device)
        self._sum, shares = None, self._parts
        if self._parts > 1:
            self._sum = GradientSum(p for p in model.parameters() if p.requires_grad)
            shares *= 1 if wrap is None else torch.distributed.get_world_size()
        self._share = torch.full((), 1 / shares, device=device)

    def step(self, tokens: torch.Tensor, first: torch.Tensor, learning_rate: float) -> torch.Tensor:
        """See `Engine`."""
        self._first.copy_(first.view(self._first.shape))
        self.optimizer.set_lr(learning_rate)
        if self._graph is None or self._steps < WARM_STEPS:
            self._work(tokens)
        else:
            if self._steps == WARM_STEPS:
                self._capture(tokens)
            self._graph.replay()
        self._steps += 1
        return self._losses

    def _work(self, tokens: torch.Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        wrapped = self._call is not self.model
        for i in range(self._parts):
            windows(tokens, self._first[i], self._ids, self._targets)
            advance(self.model.seeds)
            alone = wrapped and self._sum is not None  # nothing is exchanged for a part
            with self._call.no_sync() if alone else contextlib.nullcontext():
                loss = self._call(self._ids, self._targets)
                loss.backward(self._share)
            self._losses[i].copy_(loss.detach())
            self.model.after_backward()
            if self._sum is not None:
                self._sum.add()
        if self._sum is not None:
            if wrapped:
                torch.distributed.all_reduce(self._sum.flat)
            self._sum.give()
        self.optimizer.step()
        self.model.after_step()

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
        if hasattr(self.optimizer, "refresh_low"):
            self.optimizer.refresh_low()


class TorchEngine:
    """A twin on torch's kernels: "eager", "compile", or "compile-graphs" (reduce-overhead)."""

    def __init__(self, model: LanguageModel, mode: str = "eager", wrap: Wrap | None = None) -> None:
        config = model.config
        self.model = model
        self.optimizer = model.make_optimizer()
        options = {"mode": "reduce-overhead"} if mode == "compile-graphs" else {}
        self._call = model if wrap is None else wrap(model)
        self._run = self._call
        if mode != "eager":
            self._run = torch.compile(self._call, dynamic=False, **options)
        self._parts = config.accumulate
        self._window = torch.arange(config.context + 1, device=model.device)

    def step(self, tokens: torch.Tensor, first: torch.Tensor, learning_rate: float) -> torch.Tensor:
        """See `Engine`."""
        torch.backends.cuda.matmul.allow_tf32 = self.model.tier == "tf32"
        both = tokens[first.to(tokens.device)[:, None] + self._window].long()
        self.optimizer.set_lr(learning_rate)
        self.optimizer.zero_grad(set_to_none=True)
        losses = []
        for i, part in enumerate(both.chunk(self._parts)):
            self.model.seeds += self.model.seeds.shape[0]
            later = i + 1 < self._parts and self._call is not self.model
            with self._call.no_sync() if later else contextlib.nullcontext():
                loss = self._run(part[:, :-1], part[:, 1:])
                (loss / self._parts).backward()
            losses.append(loss.detach())
            self.model.after_backward()
        self.optimizer.step()
        self.model.after_step()
        return torch.stack(losses)

    def state_dict(self) -> dict[str, Any]:
        """See `Engine`."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Engine`."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


@torch.no_grad()
def evaluate(model: LanguageModel, tokens: torch.Tensor, batches: int, batch: int) -> float:
    """Mean loss over windows that lie evenly in `tokens`, the same ones at every call."""
    context = model.config.context
    ids, targets = (
        torch.zeros(batch, context, dtype=torch.int32, device=tokens.device) for _ in range(2)
    )
    room = len(tokens) - context
    firsts = torch.arange(batches * batch) * room // (batches * batch)
    model.eval()
    losses = []
    for first in firsts.to(tokens.device).view(batches, batch):
        windows(tokens, first, ids, targets)
        losses.append(model(ids, targets))
    model.train()
    return math.fsum(torch.stack(losses).tolist()) / batches
