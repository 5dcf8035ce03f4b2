"""What `nanogpt_speed.py` measures of `examples.nanogpt`: gradients, losses, speed, whole runs."""

import copy
import itertools
import math
import pathlib
import statistics
import sys
import time
from dataclasses import dataclass

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from examples.nanogpt.build import build_engine
from examples.nanogpt.config import Config
from examples.nanogpt.data import Corpus, offsets, windows
from examples.nanogpt.engine import Engine, first_seeds
from examples.nanogpt.model import GPT, LanguageModel
from examples.nanogpt.train import Run
from examples.nanogpt.twin import Twin


@dataclass
class Bench:
    """What all parts share; `deadline`: time.monotonic() at which a part stops where it is."""

    config: Config
    corpus: Corpus
    device: str
    deadline: float

    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def engine(self, name: str, tier: str, seed: int = 0, **options: bool) -> Engine:
        tokens = self.corpus.tokeniser.tokens
        return build_engine(name, self.config, tokens, tier, seed, self.device, **options)

    def run(self, engine: Engine, seed: int = 0) -> Run:
        return Run(engine, self.corpus, self.config, seed)


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def free(device: str) -> None:
    torch._dynamo.reset()
    if device == "cuda":
        torch.cuda.empty_cache()


# --- gradients


def snapshots(bench: Bench, tier: str, steps: list[int]) -> dict[int, dict]:
    """Weights of our run after so many steps, by step."""
    engine, kept = bench.engine("minitriton", tier), {}
    run = bench.run(engine)
    for step in sorted(steps):
        while run.done < step and not bench.late():
            run.step()
        if run.done == step:
            kept[step] = copy.deepcopy(engine.model.state_dict())
    return kept


def gradient_errors(bench: Bench, state: dict, tier: str, windows_used: int) -> dict:
    """Relative L2 error of every parameter's gradient against fp64, ours and torch's, on the same
    windows and with the same dropout masks."""
    config, tokens = bench.config, bench.corpus.tokeniser.tokens
    ids, targets = (
        torch.zeros(windows_used, config.context, dtype=torch.int32, device=bench.device)
        for _ in range(2)
    )
    first = offsets(len(bench.corpus.train), config.context, windows_used, 99, 0)
    windows(bench.corpus.train, first.to(bench.device), ids, targets)
    found = {}
    for name, kind, low in (("exact", Twin, "fp32"), ("torch", Twin, tier), ("ours", GPT, tier)):
        model = kind(config, tokens, low)
        model.load_state_dict(state)
        model.seeds.copy_(first_seeds(config, 99))
        if isinstance(model, Twin):
            model.same_masks = True
        model = model.to(bench.device)
        if name == "exact":
            model = model.double()
        elif name == "ours":
            model.make_optimizer()  # makes the low-precision copies
        torch.backends.cuda.matmul.allow_tf32 = model.tier == "tf32"
        loss = model(ids, targets)
        loss.backward()
        gradients = {n: p.grad.double() for n, p in model.named_parameters()}
        found[name] = (loss.item(), gradients)
    exact = found["exact"][1]
    errors = {
        name: {
            n: ((g - exact[n]).norm() / exact[n].norm()).item() for n, g in found[name][1].items()
        }
        for name in ("ours", "torch")
    }
    ratios = {n: e / errors["torch"][n] for n, e in errors["ours"].items()}
    worst = max(ratios, key=lambda n: ratios[n])
    return {
        "losses": {name: loss for name, (loss, _) in found.items()}, "errors": errors,
        "worst ratio": [worst, ratios[worst]],
        "largest": {name: max(e.values()) for name, e in errors.items()},
    }  # fmt: skip


# --- losses step by step


def losses(bench: Bench, name: str, tier: str, steps: int) -> list[float]:
    """Training losses of the first steps, with our masks, as far as time allows."""
    engine = bench.engine(name, tier, same_masks=True)
    run = bench.run(engine)
    values = []
    while run.done < steps and not bench.late():
        values.append(run.step().clone())
    free(bench.device)
    return [row[0] for row in torch.stack(values).tolist()] if values else []


def difference(a: list[float], b: list[float]) -> dict:
    """How two curves differ over the steps that both have."""
    gaps = [x - y for x, y in zip(a, b, strict=False)]
    result: dict = {"steps": len(gaps)}
    for limit in (10, 100, 1000):
        if len(gaps) >= limit:
            result[f"max of first {limit}"] = max(abs(g) for g in gaps[:limit])
    if len(gaps) > 1:
        result["mean"] = statistics.fmean(gaps)
        result["standard error"] = statistics.stdev(gaps) / math.sqrt(len(gaps))
    return result


def compare_losses(bench: Bench, tier: str, names: list[str], steps: int) -> dict:
    """Curves of every engine in one tier, and the differences of each pair."""
    curves = {name: losses(bench, name, tier, steps) for name in names}
    pairs = {
        f"{a} less {b}": difference(curves[a], curves[b])
        for a, b in itertools.combinations(curves, 2)
    }
    return {"differences": pairs, "curves": curves}


# --- speed


def flop_per_token(model: LanguageModel) -> float:
    """nanoGPT's formula, 6 N + 12 L d T, with N without positions."""
    config = model.config
    n = sum(p.numel() for name, p in model.named_parameters() if name != "positions")
    return 6 * n + 12 * config.layers * config.width * config.context


def speed(
    bench: Bench, name: str, tier: str, *, graph: bool, warm: int, steps: int, peak: float
) -> dict:
    """Median step, tokens per second, model FLOP utilisation at `peak` FLOP/s, peak memory."""
    cuda = bench.device == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    engine = bench.engine(name, tier, graph=graph)
    run = bench.run(engine)
    run.step()
    synchronise(bench.device)
    first = time.perf_counter() - begin
    for _ in range(warm):
        run.step()
    synchronise(bench.device)
    marks = [_mark(cuda)]
    while len(marks) <= steps and not bench.late():
        run.step()
        marks.append(_mark(cuda))
    synchronise(bench.device)
    times = [_between(a, b) for a, b in itertools.pairwise(marks)]
    result = {"seconds to the first step": first, "steps": len(times)}
    if times:
        middle = statistics.median(times)
        rate = bench.config.batch * bench.config.context / middle
        result |= {
            "ms per step": middle * 1e3, "tokens per second": rate,
            "ms per step, 10th and 90th percentile": _spread(times),
        }  # fmt: skip
        if bench.config.k3 is None:
            result["MFU"] = rate * flop_per_token(engine.model) / peak
    if cuda:
        result["peak memory in MB"] = torch.cuda.max_memory_allocated() / 1e6
    del engine, run
    free(bench.device)
    return result


def _mark(cuda: bool):
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(a, b) -> float:
    return b - a if isinstance(a, float) else a.elapsed_time(b) * 1e-3


def _spread(times: list[float]) -> list[float]:
    ordered = sorted(times)
    return [ordered[len(times) // 10] * 1e3, ordered[len(times) * 9 // 10] * 1e3]


# --- whole runs


def whole_run(bench: Bench, name: str, tier: str, seed: int) -> dict:
    """One run with its evaluations; torch draws masks of its own. Cut short where time is up."""
    engine = bench.engine(name, tier, seed)
    run = bench.run(engine, seed)
    config = bench.config
    while run.done < config.steps and not bench.late():
        run.train(until=min(config.steps, run.done + config.eval_every))
    best, step = run.record.best
    del engine
    free(bench.device)
    return {
        "complete": run.done == config.steps, "steps": run.done, "best validation loss": best,
        "at step": step, "seconds": run.record.seconds, "curves": run.record.as_dict(),
    }  # fmt: skip


def across_seeds(runs: dict[str, dict]) -> dict:
    """Mean, least and greatest best validation loss of every engine's complete runs."""
    found: dict[str, list[float]] = {}
    for title, run in runs.items():
        if run["complete"]:
            found.setdefault(title.rsplit(",", 1)[0], []).append(run["best validation loss"])
    return {
        name: {"runs": len(v), "mean": statistics.fmean(v), "least": min(v), "greatest": max(v)}
        for name, v in found.items()
    }
