"""A training step has no torch operator that computes: kernels of ours do all the work."""

import dataclasses

import pytest
import torch

from examples.nanogpt.engine import MiniTritonEngine, TorchEngine
from examples.nanogpt.model import GPT
from examples.nanogpt.twin import Twin
from tests.nanogpt.models import make

ALLOWED = {  # none of these reads a number to compute another
    "aten::alias", "aten::as_strided", "aten::detach", "aten::detach_", "aten::expand",
    "aten::flatten", "aten::numpy_T", "aten::permute", "aten::reshape", "aten::select",
    "aten::slice", "aten::split", "aten::squeeze", "aten::t", "aten::transpose", "aten::unbind",
    "aten::unflatten", "aten::unsqueeze", "aten::view", "aten::view_as", "aten::_reshape_alias",
    "aten::lift_fresh", "aten::narrow", "aten::to", "aten::contiguous",
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty",
}  # fmt: skip
# windows of the batch and, where the rate changes, its value go to the device; the loss is kept
COPIES = 3


def operators(work):
    """Which operators of torch run, also inside autograd, and how often."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    return {e.key: e.count for e in profile.key_averages() if e.key.startswith("aten::")}


@pytest.mark.parametrize(("tier", "dropout"), [("bf16", 0.1), ("fp32", 0.0)])
def test_kernels_do_all_the_work(small, corpus, tier, dropout):
    config = dataclasses.replace(small, dropout=dropout, layers=2)
    engine = MiniTritonEngine(make(GPT, config, corpus, tier), config.batch, graph=False)
    first = torch.zeros(1, dtype=torch.int64)
    seen = operators(lambda: engine.step(corpus.train, first, 1e-3))
    assert seen.pop("aten::copy_") <= COPIES
    assert not set(seen) - ALLOWED, {name: seen[name] for name in set(seen) - ALLOWED}


def test_what_computes_is_seen(small, corpus):
    twin = TorchEngine(make(Twin, small, corpus))
    seen = operators(lambda: twin.step(corpus.train, torch.zeros(1, dtype=torch.int64), 1e-3))
    assert {"aten::mm", "aten::gelu_backward", "aten::add", "aten::embedding"} < set(seen)
