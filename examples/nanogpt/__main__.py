"""Command line: train, compare with torch, sample. See `python -m examples.nanogpt --help`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from examples.nanogpt.checkpoint import CheckpointError
from examples.nanogpt.config import CONFIGS, Config
from examples.nanogpt.data import Corpus, DataError, load_text, make_corpus
from examples.nanogpt.engine import Engine, MiniTritonEngine, TorchEngine, first_seeds
from examples.nanogpt.model import GPT, TIERS
from examples.nanogpt.sample import generate
from examples.nanogpt.train import Record, Run, TrainingError
from examples.nanogpt.twin import Twin

ENGINES = ("minitriton", "torch", "torch-compile", "torch-compile-graphs")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.nanogpt",
        description="Trains a GPT on MiniTriton's kernels; without a GPU, --config tiny.",
    )
    parser.add_argument("--config", choices=CONFIGS, default="shakespeare")
    parser.add_argument("--data", type=Path, help="a text in UTF-8 (default: tiny Shakespeare)")
    parser.add_argument("--tier", choices=TIERS, default="bf16")
    parser.add_argument("--engine", choices=ENGINES, default="minitriton")
    parser.add_argument("--compare", choices=ENGINES[1:], help="train this one too, plot both")
    parser.add_argument("--same-masks", action="store_true", help="torch draws our dropout masks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/nanogpt"))
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    parser.add_argument("--sample", type=int, default=200, help="tokens of text at the end")
    parser.add_argument("--no-graph", action="store_true", help="no CUDA graph")
    for name in ("steps", "batch", "context", "eval_every", "eval_batches"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--dropout", type=float)
    return parser.parse_args(arguments)


def configure(options: argparse.Namespace) -> Config:
    """The chosen configuration with what the command line changes."""
    names = ("steps", "batch", "context", "eval_every", "eval_batches", "dropout")
    changes = {n: getattr(options, n) for n in names if getattr(options, n) is not None}
    config = dataclasses.replace(CONFIGS[options.config], **changes)
    if config.context > 65_536 or config.context < 1 or config.batch < 1:
        raise DataError(f"context {config.context} and batch {config.batch} must be positive")
    return config


def make_engine(
    name: str, config: Config, tokens: int, options: argparse.Namespace, device: str, rank: int,
    ranks: int,
) -> Engine:  # fmt: skip
    """An engine whose weights depend on the seed alone."""
    torch.manual_seed(options.seed)
    kind = GPT if name == "minitriton" else Twin
    model = kind(config, tokens, options.tier)
    model.seeds.copy_(first_seeds(config, options.seed, rank))
    model = model.to(device)
    batch = config.batch // ranks
    if isinstance(model, Twin):
        model.same_masks = options.same_masks
        return TorchEngine(model, batch, name.removeprefix("torch").strip("-") or "eager")
    wrap = None
    if ranks > 1:
        ids = [torch.cuda.current_device()] if device == "cuda" else None
        wrap = lambda m: torch.nn.parallel.DistributedDataParallel(m, device_ids=ids)
    graph = device == "cuda" and ranks == 1 and not options.no_graph
    return MiniTritonEngine(model, batch, graph=graph, wrap=wrap)


@contextlib.contextmanager
def progress_bar(steps: int, quiet: bool) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, disable=quiet) as bar:
        yield bar


def train(
    name: str, config: Config, corpus: Corpus, options: argparse.Namespace, device: str, rank: int,
    ranks: int,
) -> tuple[Engine, Record]:  # fmt: skip
    engine = make_engine(name, config, corpus.tokeniser.tokens, options, device, rank, ranks)
    identity = {
        "engine_name": name, "tier": options.tier, "seed": options.seed, "ranks": ranks,
        "config": dataclasses.asdict(config) | {"betas": list(config.betas)},
        "corpus": corpus.digest,
    }  # fmt: skip
    with progress_bar(config.steps, quiet=rank != 0) as bar:
        task = bar.add_task(name, total=config.steps, loss=float("nan"))
        run = Run(
            engine, corpus, config, options.seed, folder=options.out / name, identity=identity,
            rank=rank, ranks=ranks,
            progress=lambda step, loss: bar.update(task, completed=step, loss=loss),
        )  # fmt: skip
        if options.resume:
            run.resume()
        record = run.train()
    return engine, record


def summary(name: str, config: Config, record: Record) -> str:
    tokens = len(record.losses) * config.batch * config.context
    best, step = record.best
    rate = tokens / record.seconds if record.seconds else 0.0
    return (
        f"{name}: {len(record.losses)} steps, {rate:,.0f} tokens/s, last loss "
        f"{record.losses[-1]:.4f}, best validation loss {best:.4f} at step {step}"
    )


def start_processes() -> tuple[int, int, str]:
    """(rank, ranks, device) of this process; under torchrun it joins the others."""
    cuda = torch.cuda.is_available()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        torch.distributed.init_process_group("nccl" if cuda else "gloo")
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return int(os.environ.get("RANK", "0")), ranks, "cuda" if cuda else "cpu"


def run(options: argparse.Namespace) -> None:
    rank, ranks, device = start_processes()
    config = configure(options)
    if device == "cpu" and options.config not in ("tiny", "small"):
        raise TrainingError(
            f"no GPU: '{options.config}' would take days in the emulator; use --config tiny"
        )
    if config.batch % ranks:
        raise TrainingError(f"a batch of {config.batch} does not divide among {ranks} processes")
    by_byte = options.config == "124m-shape"
    corpus = make_corpus(load_text(options.data), config.context, by_byte, device)
    names = [options.engine, *([options.compare] if options.compare else [])]
    records = {}
    for name in names:
        engine, records[name] = train(name, config, corpus, options, device, rank, ranks)
        if rank == 0:
            print(summary(name, config, records[name]))
            if options.sample and name == "minitriton":
                print(generate(engine.model, corpus.tokeniser, "\n", options.sample))
    if rank == 0 and options.compare:
        from examples.nanogpt.plot import plot

        gaps = [abs(a - b) for a, b in zip(*(r.losses for r in records.values()), strict=True)]
        mean = sum(gaps) / len(gaps)
        print(f"largest difference of a step's loss: {max(gaps):.2e}, mean {mean:.2e}")
        plot(records, options.out / "curves.png")
        print(f"curves: {options.out / 'curves.png'}")
    if ranks > 1:
        torch.distributed.destroy_process_group()


def main(arguments: list[str] | None = None) -> int:
    """0, or 2 with a message for what the user can mend."""
    options = parse(arguments)
    try:
        run(options)
    except (DataError, CheckpointError, TrainingError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
