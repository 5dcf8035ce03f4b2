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
    """Ours and the twin take the same course; loss falls; a resumed run goes on with equal bits."""
    config = dataclasses.replace(config, steps=3, warmup=1, learning_rate=3e-3)

    def begin(kind, seed=0):
        model = make(kind, config, corpus, seed=seed)
        ours = kind is K3
        engine = MiniTritonEngine(model, config.batch, graph=False) if ours else TorchEngine(model)
        return Run(engine, corpus, config, seed=0)

    ours, theirs, resumed = begin(K3), begin(K3Twin), begin(K3, seed=1)
    losses = [ours.step().item() for _ in range(2)]
    resumed.engine.load_state_dict(copy.deepcopy(ours.engine.state_dict()))
    resumed.done = ours.done
    losses.append(ours.step().item())
    assert resumed.step().item() == losses[-1] < losses[0] - 0.1
    assert losses == pytest.approx([theirs.step().item() for _ in losses], abs=2e-3)

    states = [run.engine.model.state_dict() for run in (ours, theirs, resumed)]
    for name, value in states[0].items():
        assert torch.equal(value, states[2][name])
        if name.startswith("stack.feeds") and name.endswith("bias"):
            assert value.abs().max() > 0 and value.mean().abs() < 1e-6
            torch.testing.assert_close(value, states[1][name], atol=2e-2, rtol=0)


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
