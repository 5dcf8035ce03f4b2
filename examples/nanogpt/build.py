"""Engines by name: a model, where it runs, and what trains it."""

from __future__ import annotations

import warnings

import torch

from examples.nanogpt.config import Config
from examples.nanogpt.engine import Engine, MiniTritonEngine, TorchEngine
from examples.nanogpt.k3_model import K3, K3Twin
from examples.nanogpt.model import GPT, LanguageModel
from examples.nanogpt.twin import Twin

ENGINES = ("minitriton", "torch", "torch-compile", "torch-compile-graphs")


def build_engine(
    name: str, config: Config, tokens: int, tier: str, seed: int, device: str, *, ranks: int = 1,
    graph: bool = True, same_masks: bool = False,
) -> Engine:  # fmt: skip
    """An engine whose weights depend on the seed alone; ranks: processes that share a batch.

    graph: replay CUDA graphs where that can be done; same_masks: torch draws our dropout masks.
    """
    torch.manual_seed(seed)
    ours = name == "minitriton"
    kind: type[LanguageModel]
    if config.k3 is None:
        kind = GPT if ours else Twin
    else:
        kind = K3 if ours else K3Twin
    model = kind(config, tokens, tier).to(device)
    wrap = _distribute if ranks > 1 else None
    if ours:
        graph = graph and device == "cuda" and ranks == 1
        return MiniTritonEngine(model, config.batch // ranks, graph=graph, wrap=wrap)
    if isinstance(model, Twin):
        model.same_masks = same_masks
    return TorchEngine(model, name.removeprefix("torch").strip("-") or "eager", wrap)


def _distribute(model: torch.nn.Module) -> torch.nn.Module:
    """Data parallel; buffers stay as they are, for each process draws dropout masks of its own."""
    ids = [torch.cuda.current_device()] if torch.cuda.is_available() else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the option's new name is not in torch 2.6
        return torch.nn.parallel.DistributedDataParallel(
            model, device_ids=ids, broadcast_buffers=False
        )
