"""The nanoGPT example measured: exactness beside fp64 and torch, speed beside torch, whole runs.

    python benchmarks/nanogpt_speed.py --parts speed --out benchmarks/results/nanogpt
    python benchmarks/nanogpt_speed.py --parts full --engines minitriton,torch --seeds 0,1,2
    python benchmarks/nanogpt_speed.py --config tiny --data TEXT --limit 60     # without a GPU

Parts: `gradients` (every parameter against an fp64 twin after 0, 100 and 1000 steps of our run,
torch's own error beside), `losses` (same weights, batches and masks, step by step: fp32 for 1000
steps, tf32 and bf16 beside torch eager and torch.compile), `speed` (median step after warm-up of
every engine) and `full` (whole runs with evaluations). Results are written after each piece, so
that a run which is cut short leaves what it has; `--limit` seconds for all parts together. A part
that was written before is kept unless it is measured again.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import nanogpt_runs
import torch
from nanogpt_runs import Bench

from examples.nanogpt.config import CONFIGS
from examples.nanogpt.data import load_text, make_corpus
from examples.nanogpt.plot import plot
from examples.nanogpt.train import Record
from minitriton.bench.measure import machine

ENGINES = "minitriton,minitriton-no-graph,torch,torch-compile,torch-compile-graphs"
PARTS = "gradients,losses,speed,full"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--parts", default=PARTS, help=f"of {PARTS}")
    add("--config", default="shakespeare", choices=CONFIGS, help="k3: speed and full, in fp32")
    add("--data", type=pathlib.Path, help="a text (default: tiny Shakespeare, downloaded)")
    add("--out", type=pathlib.Path, default=pathlib.Path("benchmarks/results/nanogpt"))
    add("--limit", type=float, default=480, help="seconds in all")
    add("--tiers", default="fp32,tf32,bf16", help="of the losses")
    add("--speed-tiers", help="of speed and whole runs (default: bf16, and fp32 for k3)")
    add("--gradient-tier", default="fp32", help="fp32, ieee, tf32 or bf16")
    add("--gradient-steps", default="0,100,1000")
    add("--windows", type=int, default=16, help="batch of the gradients")
    add("--engines", default=ENGINES)
    add("--seeds", default="0")
    add("--steps", type=int, default=1000, help="of the losses")
    add("--timed", type=int, default=100, help="timed steps")
    add("--warm", type=int, default=20, help="steps before them")
    add("--full-steps", type=int, help="of whole runs (default: the configuration's)")
    add("--peak", type=float, default=989e12, help="FLOP/s that MFU refers to: dense bf16, H200")
    add("--dropout", type=float, help="in place of the configuration's")
    return parser.parse_args()


class Results:
    """What was found, in one JSON file, and the curves, in another; written after every piece."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path, self.curves_path = path.with_suffix(".json"), path.with_suffix(".curves.json")
        self.content, self.curves = _read(self.path), _read(self.curves_path)

    def put(self, part: str, title: str, value: dict) -> None:
        entry = {**value, "command": " ".join(sys.argv)}
        curves = entry.pop("curves", None)
        if curves is not None:
            self.curves.setdefault(part, {})[title] = curves
        self.content.setdefault(part, {})[title] = entry
        self.content["machine"] = machine() if torch.cuda.is_available() else {}
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.content, indent=1) + "\n")
        self.curves_path.write_text(json.dumps(self.curves) + "\n")


def _read(path: pathlib.Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {}


def gradients(bench: Bench, options: argparse.Namespace, results: Results) -> None:
    tier = options.gradient_tier
    steps = [int(n) for n in options.gradient_steps.split(",")]
    for step, state in nanogpt_runs.snapshots(bench, "bf16", steps).items():
        found = nanogpt_runs.gradient_errors(bench, state, tier, options.windows)
        results.put("gradients", f"{tier}, step {step}", found)
        name, ratio = found["worst ratio"]
        print(
            f"{tier} gradients after {step} steps: worst {found['largest']['ours']:.1e} (torch "
            f"{found['largest']['torch']:.1e}), at most {ratio:.2f} times torch's ({name})",
            flush=True,
        )


def losses(bench: Bench, options: argparse.Namespace, results: Results) -> None:
    for tier in options.tiers.split(","):
        names = ["minitriton", "torch", "torch-compile"]
        found = nanogpt_runs.compare_losses(bench, tier, names, options.steps)
        results.put("losses", tier, found)
        for pair, gap in found["differences"].items():
            shown = ", ".join(f"{k} {v:.1e}" for k, v in gap.items() if k != "steps")
            print(f"{tier} losses, {pair}, {gap['steps']} steps: {shown}", flush=True)


def speed(bench: Bench, options: argparse.Namespace, results: Results) -> None:
    for tier in options.speed_tiers.split(","):
        for name in options.engines.split(","):
            if bench.late():
                print(f"{name}: no time left")
                continue
            found = nanogpt_runs.speed(
                bench, name.removesuffix("-no-graph"), tier, graph=not name.endswith("-no-graph"),
                warm=options.warm, steps=options.timed, peak=options.peak,
            )  # fmt: skip
            results.put("speed", f"{options.config}, {tier}, {name}", found)
            shown = ", ".join(f"{k} {v:,.4g}" for k, v in found.items() if isinstance(v, float))
            print(f"{options.config} {tier} {name}: {shown}", flush=True)


def full(bench: Bench, options: argparse.Namespace, results: Results) -> None:
    if options.full_steps:
        config = dataclasses.replace(bench.config, steps=options.full_steps)
        bench = dataclasses.replace(bench, config=config)
    tier = options.speed_tiers.split(",")[0]
    for seed in (int(s) for s in options.seeds.split(",")):
        for name in options.engines.split(","):
            if bench.late() or name.endswith("-no-graph"):
                continue
            found = nanogpt_runs.whole_run(bench, name, tier, seed)
            results.put("full", f"{name}, {tier}, seed {seed}", found)
            print(
                f"{name} {tier} seed {seed}: {found['steps']} steps in "
                f"{found['seconds']:.0f} s, best validation loss "
                f"{found['best validation loss']:.4f} at step {found['at step']}",
                flush=True,
            )
    found = nanogpt_runs.across_seeds(results.content.get("full", {}))
    results.content["best validation loss"] = found
    results.write()
    curves = {t: Record.from_dict(run) for t, run in results.curves.get("full", {}).items()}
    if curves:
        plot(curves, options.out.with_suffix(".png"))


def main() -> None:
    options = parse()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = CONFIGS[options.config]
    options.speed_tiers = options.speed_tiers or ("bf16" if config.k3 is None else "fp32")
    if options.dropout is not None:
        config = dataclasses.replace(config, dropout=options.dropout)
    corpus = make_corpus(load_text(options.data), config.context, config.by_byte, device)
    bench = Bench(config, corpus, device, time.monotonic() + options.limit)
    results = Results(options.out)
    parts = {"gradients": gradients, "losses": losses, "speed": speed, "full": full}
    for part in options.parts.split(","):
        parts[part](bench, options, results)


if __name__ == "__main__":
    main()
