"""Command line: train, compare with torch, sample. See `python -m examples.nanogpt --help`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from examples.nanogpt.build import ENGINES, build_engine
from examples.nanogpt.checkpoint import CheckpointError
from examples.nanogpt.config import CONFIGS, Config
from examples.nanogpt.data import Corpus, DataError, load_text, make_corpus
from examples.nanogpt.engine import Engine
from examples.nanogpt.model import TIERS
from examples.nanogpt.sample import encode_start, generate
from examples.nanogpt.train import Record, Run, TrainingError

COUNTS = ("steps", "batch", "context", "eval_every", "eval_batches", "accumulate")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.nanogpt",
        description="Trains a GPT on MiniTriton's kernels; without a GPU, --config tiny.",
    )
    parser.add_argument("--config", choices=CONFIGS, default="shakespeare")
    parser.add_argument("--data", type=Path, help="a text in UTF-8 (default: tiny Shakespeare)")
    parser.add_argument("--tier", choices=TIERS, help="default: bf16, and fp32 for k3")
    parser.add_argument("--engine", choices=ENGINES, default="minitriton")
    parser.add_argument("--compare", choices=ENGINES[1:], help="train this one too, plot both")
    parser.add_argument("--same-masks", action="store_true", help="torch draws our dropout masks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/nanogpt"))
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    parser.add_argument("--overwrite", action="store_true", help="begin anew where a run is")
    parser.add_argument("--sample", type=int, help="tokens of text at the end (200; 20 on a CPU)")
    parser.add_argument("--prompt", default="", help="what that text continues")
    parser.add_argument("--no-graph", action="store_true", help="no CUDA graph")
    parser.add_argument("--save-every", type=int, default=500, help="steps between checkpoints")
    for name in COUNTS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--dropout", type=float)
    return parser.parse_args(arguments)


def configure(options: argparse.Namespace) -> Config:
    """The chosen configuration with what the command line changes."""
    names = (*COUNTS, "dropout")
    changes = {n: getattr(options, n) for n in names if getattr(options, n) is not None}
    config = dataclasses.replace(CONFIGS[options.config], **changes)
    counts = {name: getattr(config, name) for name in COUNTS} | {"save_every": options.save_every}
    for name, count in counts.items():
        if count < 1:
            raise TrainingError(f"--{name.replace('_', '-')} must be positive, got {count}")
    if not 0 <= config.dropout < 1:
        raise TrainingError(f"--dropout must be at least 0 and below 1, got {config.dropout}")
    if config.k3 is not None and config.dropout > 0:
        raise TrainingError("K3 has no dropout; leave --dropout at 0")
    return config


def choose_tier(options: argparse.Namespace, config: Config) -> str:
    if config.k3 is None:
        return options.tier or "bf16"
    if options.tier not in (None, "fp32"):
        raise TrainingError(
            f"the K3 model is trained in fp32 only; leave out --tier {options.tier}"
        )
    return "fp32"


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
    engine = build_engine(
        name, config, corpus.tokeniser.tokens, choose_tier(options, config), options.seed, device,
        ranks=ranks, graph=not options.no_graph, same_masks=options.same_masks,
    )  # fmt: skip
    identity = {
        "engine_name": name, "tier": engine.model.tier, "seed": options.seed, "ranks": ranks,
        "same_masks": options.same_masks and name != "minitriton", "corpus": corpus.digest,
        **config.flat(),
    }  # fmt: skip
    with progress_bar(config.steps, quiet=rank != 0) as bar:
        task = bar.add_task(name, total=config.steps, loss=float("nan"))
        run = Run(
            engine, corpus, config, options.seed, folder=options.out / name, identity=identity,
            save_every=options.save_every, rank=rank, ranks=ranks,
            progress=lambda step, loss: bar.update(task, completed=step, loss=loss),
        )  # fmt: skip
        if options.resume:
            run.resume()
        elif run.path.exists() and not options.overwrite:
            raise TrainingError(
                f"{run.path} is there: --resume continues that run, --overwrite begins anew, "
                "--out goes elsewhere"
            )
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


def check(options: argparse.Namespace, config: Config, ranks: int, device: str) -> None:
    """TrainingError for what would end badly only after hours."""
    choose_tier(options, config)
    if device == "cpu" and not config.in_emulator:
        raise TrainingError(
            f"no GPU: '{options.config}' would take days in the emulator; use --config tiny"
        )
    if config.batch % (ranks * config.accumulate):
        raise TrainingError(
            f"a batch of {config.batch} does not divide among {ranks} processes that take it in "
            f"{config.accumulate} parts"
        )
    if options.compare and importlib.util.find_spec("matplotlib") is None:
        raise TrainingError("--compare plots with matplotlib: pip install minitriton[examples]")
    if options.compare == options.engine:
        raise TrainingError(f"--compare {options.compare} is the engine itself")


def run(options: argparse.Namespace) -> None:
    config = configure(options)
    rank, ranks, device = start_processes()
    check(options, config, ranks, device)
    length = options.sample if options.sample is not None else 200 if device == "cuda" else 20
    if ranks > 1 and rank > 0:
        torch.distributed.barrier()  # the first process may have to download the text
    text = load_text(options.data)
    if ranks > 1 and rank == 0:
        torch.distributed.barrier()
    corpus = make_corpus(text, config.context, config.by_byte, device)
    if length > 0:
        encode_start(corpus.tokeniser, options.prompt, config.context)
    names = [options.engine, *([options.compare] if options.compare else [])]
    records = {}
    for name in names:
        engine, records[name] = train(name, config, corpus, options, device, rank, ranks)
        if rank == 0:
            print(summary(name, config, records[name]))
            if length > 0 and name == "minitriton":
                print(generate(engine.model, corpus.tokeniser, options.prompt, length))
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
    """0, or 2 with a message for what the user can mend, or 130 after an interruption."""
    options = parse(arguments)
    try:
        run(options)
    except (DataError, CheckpointError, TrainingError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            f"interrupted; --resume continues from a checkpoint in {options.out}", file=sys.stderr
        )
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
