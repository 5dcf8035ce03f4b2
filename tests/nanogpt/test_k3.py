"""The language model of K3's parts: gradients, a few steps beside its torch twin, balancing."""

import copy
import dataclasses

import pytest
import torch

from examples.nanogpt.config import CONFIGS
from examples.nanogpt.data import make_corpus
from examples.nanogpt.engine import MiniTritonEngine, TorchEngine
from examples.nanogpt.k3_model import K3, K3Twin
from examples.nanogpt.train import Run
from tests.nanogpt.models import batch_of, errors, gradients, in_fp64, make


@pytest.fixture
def config():
    """One layer with KDA, one with MLA and experts."""
    tiny = CONFIGS["k3-tiny"]
    sizes = dataclasses.replace(tiny.k3, layers=2, block=1)
    return dataclasses.replace(
        tiny, k3=sizes, layers=2, batch=1, context=32, eval_every=9, eval_batches=1
    )


@pytest.fixture
def corpus(text, config, device, unchecked):
    return make_corpus(text, config.context, by_byte=False, device=device)


def test_gradients_against_fp64(config, corpus):
    ours, twin = (make(kind, config, corpus, trained=True) for kind in (K3, K3Twin))
    batch = batch_of(corpus, config)
    loss, found = gradients(ours, *batch)
    expected, wanted = gradients(in_fp64(twin), *batch)
    _, torchs = gradients(twin, *batch)
    assert abs(loss - expected) < 1e-5 * expected
    limits = errors(torchs, wanted)
    for name, error in errors(found, wanted).items():
        assert error < max(4 * limits[name], 5e-5), name


def test_a_few_steps(config, corpus):
    """Ours and the twin take the same course; loss falls; no expert keeps all tokens."""
    config = dataclasses.replace(config, steps=3, warmup=1, learning_rate=3e-3)
    engines = (
        MiniTritonEngine(make(K3, config, corpus), config.batch, graph=False),
        TorchEngine(make(K3Twin, config, corpus)),
    )
    runs = [Run(engine, corpus, config, seed=0) for engine in engines]
    ours, theirs = ([run.step().item() for _ in range(config.steps)] for run in runs)
    assert ours[-1] < ours[0] - 0.1
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 2e-3
    for mine, twins in zip(*(e.model.state_dict().items() for e in engines), strict=True):
        if mine[0].startswith("stack.feeds") and mine[0].endswith("bias"):
            assert mine[1].abs().max() > 0 and mine[1].mean().abs() < 1e-6
            torch.testing.assert_close(mine[1], twins[1], atol=2e-2, rtol=0)
    resumed = MiniTritonEngine(make(K3, config, corpus, seed=1), config.batch, graph=False)
    resumed.load_state_dict(copy.deepcopy(engines[0].state_dict()))
    first = torch.zeros(config.batch, dtype=torch.int64)
    for _ in range(2):  # the second shows the step itself
        losses = [e.step(corpus.train, first, 1e-3).item() for e in (engines[0], resumed)]
        assert losses[0] == losses[1]


@pytest.mark.gpu
def test_a_graph_changes_no_bit(config, corpus, device):
    if device != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    first = torch.zeros(config.batch, dtype=torch.int64)
    losses = []
    for graph in (False, True):
        engine = MiniTritonEngine(make(K3, config, corpus), config.batch, graph=graph)
        losses.append([engine.step(corpus.train, first, 1e-3).item() for _ in range(8)])
    assert losses[0] == losses[1]


def test_biases_balance_the_experts(config, corpus):
    """With weights at rest, the biases alone even out who gets how many tokens."""
    model = make(K3, config, corpus, trained=True)
    ids, targets = batch_of(corpus, config)
    spread = []
    for _ in range(3):
        with torch.no_grad():
            model(ids, targets)
        counts = torch.stack([feed.routing.counts for feed in model._routed()]).float()
        spread.append(counts.std(1).mean().item())
        model.after_backward()
        model.after_step()
    assert spread[-1] < 0.6 * spread[0] and not model.counts.any()


def test_every_parameter_has_one_optimizer(config, corpus):
    model = make(K3, config, corpus)
    projections, others = model._groups()
    listed = [p for group in (*projections, *others) for p in group["params"]]
    assert len(listed) == len({id(p) for p in listed}) == len(list(model.parameters()))
    assert sorted(group["heads"] for group in projections) == [2, 6]
