"""Tokens per second of the nanoGPT example on one GPU and, data parallel, on several.

    torchrun --nproc-per-node=1 benchmarks/nanogpt_ddp.py --out benchmarks/results/nanogpt_ddp.json
    torchrun --nproc-per-node=2 benchmarks/nanogpt_ddp.py --out benchmarks/results/nanogpt_ddp.json

The batch is that of all processes together. One process is timed twice, with and without a CUDA
graph of the step, since communication keeps steps of several processes out of a graph; speed-ups
count from both. Entries of earlier calls stay in the file.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from examples.nanogpt.__main__ import start_processes
from examples.nanogpt.build import build_engine
from examples.nanogpt.config import CONFIGS
from examples.nanogpt.data import load_text, make_corpus
from examples.nanogpt.train import Run
from minitriton.bench.measure import machine


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--config", default="124m-shape", choices=CONFIGS)
    add("--batch", type=int, default=24, help="windows of a step, of all processes")
    add("--data", type=pathlib.Path, help="a text (default: tiny Shakespeare, downloaded)")
    add("--engines", default="minitriton,torch")
    add("--warm", type=int, default=10)
    add("--timed", type=int, default=30)
    add("--out", type=pathlib.Path)
    return parser.parse_args()


def seconds_per_step(run: Run, warm: int, timed: int) -> float:
    """Median over steps, each up to the end of its kernels on this process's device."""
    times = []
    for step in range(warm + timed):
        begin = time.perf_counter()
        run.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if step >= warm:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def main() -> None:
    options = parse()
    rank, ranks, device = start_processes()
    config = dataclasses.replace(CONFIGS[options.config], batch=options.batch)
    text = load_text(options.data)
    corpus = make_corpus(text, config.context, config.by_byte, device)
    found = {}
    for name in options.engines.split(","):
        for graph in (True, False) if ranks == 1 and name == "minitriton" else (False,):
            engine = build_engine(
                name, config, corpus.tokeniser.tokens, "bf16" if config.k3 is None else "fp32", 0,
                device, ranks=ranks, graph=graph,
            )  # fmt: skip
            run = Run(engine, corpus, config, 0, rank=rank, ranks=ranks)
            seconds = seconds_per_step(run, options.warm, options.timed)
            kind = f"{name} with graph" if graph else name
            title = f"{options.config}, {kind}, {ranks} process{'es' if ranks > 1 else ''}"
            rate = config.batch * config.context / seconds
            found[title] = {"ms per step": seconds * 1e3, "tokens per second": rate}
            if rank == 0:
                print(f"{title}: {seconds * 1e3:.2f} ms a step, {rate:,.0f} tokens/s", flush=True)
    if rank == 0 and options.out:
        content = json.loads(options.out.read_text()) if options.out.exists() else {}
        content |= {t: {**e, "command": " ".join(sys.argv)} for t, e in found.items()}
        content["machine"] = machine() if device == "cuda" else {}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(content, indent=1) + "\n")
    if ranks > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
