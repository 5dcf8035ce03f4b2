"""The training loop: schedule, evaluation, checkpoints, a record of every loss."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from examples.nanogpt import checkpoint
from examples.nanogpt.config import Config
from examples.nanogpt.data import Corpus, offsets
from examples.nanogpt.engine import Engine, evaluate, first_seeds, learning_rate
from examples.nanogpt.files import replace_file

LOOK_EVERY = 50  # steps between looks at the losses where these wait for a GPU


class TrainingError(RuntimeError):
    """A run that cannot go on."""


@dataclass
class Record:
    """What a run has measured; everything a plot or a comparison needs."""

    losses: list[float] = field(default_factory=list)  # of every step
    evaluations: list[tuple[int, float, float]] = field(default_factory=list)  # step, train, val
    seconds: float = 0.0  # training alone

    @property
    def best(self) -> tuple[float, int]:
        """Lowest validation loss and its step."""
        found = min(((val, step) for step, _, val in self.evaluations), default=(math.inf, 0))
        return found

    def as_dict(self) -> dict[str, Any]:
        return {
            "losses": self.losses,
            "evaluations": [list(e) for e in self.evaluations],
            "seconds": self.seconds,
        }

    @staticmethod
    def from_dict(content: dict[str, Any]) -> Record:
        evaluations = [(int(s), float(t), float(v)) for s, t, v in content["evaluations"]]
        return Record(list(content["losses"]), evaluations, content["seconds"])


@dataclass
class Run:
    """One training run of an engine on a corpus; `rank` of `ranks` processes share each batch."""

    engine: Engine
    corpus: Corpus
    config: Config
    seed: int
    folder: Path | None = None  # of checkpoints and the record; None: nothing is written
    identity: dict[str, Any] = field(default_factory=dict)  # what a checkpoint must agree on
    save_every: int = 500
    rank: int = 0
    ranks: int = 1
    progress: Callable[[int, float], None] = lambda step, loss: None

    def __post_init__(self) -> None:
        self.record = Record()
        self.done = 0
        self._kept: int | None = None  # the step of the last checkpoint
        self._fresh: list[torch.Tensor] = []
        self._seed_masks()

    def _seed_masks(self) -> None:
        """Each process and each step has dropout masks of its own."""
        seeds = first_seeds(self.config, self.seed, self.rank, self.done)
        self.engine.model.seeds.copy_(seeds)

    @property
    def path(self) -> Path:
        """The last checkpoint."""
        assert self.folder is not None
        return self.folder / "checkpoint.pt"

    def resume(self) -> None:
        """Continues from the last checkpoint; CheckpointError if it does not fit this run."""
        content = checkpoint.load(self.path, str(self.corpus.train.device))
        checkpoint.expect_same(self.path, content, self.identity)
        self.engine.load_state_dict(content["engine"])
        self.record = Record.from_dict(content["record"])
        self.done = self._kept = content["step"]
        self._seed_masks()

    def train(self, until: int | None = None) -> Record:
        """Steps up to `until` (all of them by default); TrainingError if a loss is not finite."""
        last = self.config.steps if until is None else until
        look_every = LOOK_EVERY if self.corpus.train.is_cuda else 1
        begin = time.perf_counter()
        while self.done < last:
            if self.done % self.config.eval_every == 0:
                begin = self._pause(begin, self._evaluate)
            self._fresh.append(self.step().clone())
            if self.done % look_every == 0 or self.done == last:
                self._look()
            if self.folder is not None and self.done % self.save_every == 0:
                begin = self._pause(begin, self._save)
        self._pause(begin, self._evaluate if last == self.config.steps else self._look)
        if self.folder is not None:
            self._save()
        return self.record

    def step(self) -> torch.Tensor:
        """One step, and the losses that its engine gives."""
        config = self.config
        first = offsets(len(self.corpus.train), config.context, config.batch, self.seed, self.done)
        share = config.batch // self.ranks
        mine = first[self.rank * share : (self.rank + 1) * share]
        rate = learning_rate(config, self.done)
        self.done += 1
        return self.engine.step(self.corpus.train, mine, rate)

    def _look(self) -> None:
        """Fetches the losses since the last look; stops where one is not finite."""
        if not self._fresh:
            return
        parts = torch.stack(self._fresh)  # [steps, parts of a batch]
        self._fresh = []
        if self.ranks > 1:  # so that all processes see, and stop at, the same numbers
            torch.distributed.all_reduce(parts)
        losses = [math.fsum(row) / (len(row) * self.ranks) for row in parts.tolist()]
        for loss in losses:
            if not math.isfinite(loss):
                step = len(self.record.losses)
                kept = "no checkpoint was written"
                if self._kept is not None:
                    kept = f"the last good checkpoint is {self.path}, at step {self._kept}"
                raise TrainingError(f"the loss at step {step} is {loss}; {kept}")
            self.record.losses.append(loss)
        self.progress(self.done, losses[-1])

    def _evaluate(self) -> None:
        self._look()
        if self.record.evaluations and self.record.evaluations[-1][0] == self.done:
            return  # resumed where an evaluation had just been made
        config = self.config
        train, validation = (
            evaluate(self.engine.model, part, config.eval_batches, config.batch)
            for part in (self.corpus.train, self.corpus.validation)
        )
        self.record.evaluations.append((self.done, train, validation))

    def _pause(self, begin: float, work: Callable[[], None]) -> float:
        """Does work that is not training: it does not count in `record.seconds`."""
        if self.corpus.train.is_cuda:
            torch.cuda.synchronize()
        self.record.seconds += time.perf_counter() - begin
        work()
        return time.perf_counter()

    def _save(self) -> None:
        self._look()
        if self.folder is None:
            return
        self._kept = self.done
        if self.rank != 0:
            return
        checkpoint.save(
            self.path,
            {
                **self.identity, "step": self.done, "engine": self.engine.state_dict(),
                "record": self.record.as_dict(), "alphabet": self.corpus.tokeniser.alphabet,
            },
        )  # fmt: skip
        numbers = json.dumps(self.record.as_dict()) + "\n"
        replace_file(self.folder / "record.json", lambda file: file.write(numbers.encode()))
