"""The model trains like its torch twin, gradient by gradient and step by step, and repeatably."""

import copy
import dataclasses

import pytest
import torch

from examples.nanogpt.config import CONFIGS
from examples.nanogpt.engine import (
    MiniTritonEngine,
    TorchEngine,
    evaluate,
    first_seeds,
    learning_rate,
)
from examples.nanogpt.model import GPT
from examples.nanogpt.train import Run
from examples.nanogpt.twin import Twin


def make(kind, config, corpus, tier="fp32", seed=0):
    torch.manual_seed(seed)
    model = kind(config, corpus.tokeniser.tokens, tier)
    model.seeds.copy_(first_seeds(config, seed))
    if kind is Twin:
        model.same_masks = True
    return model.to(corpus.train.device)


def batch_of(corpus, config):
    n = config.batch * config.context
    ids = corpus.train[:n].view(config.batch, -1)
    return ids, corpus.train[1 : n + 1].view(config.batch, -1)


def gradients(model, ids, targets):
    """The loss, and the gradient of every parameter by name."""
    model.zero_grad(set_to_none=True)
    loss = model(ids, targets)
    loss.backward()
    return loss.item(), {name: p.grad.double() for name, p in model.named_parameters()}


def errors(found, exact):
    return {name: ((found[name] - g).norm() / g.norm()).item() for name, g in exact.items()}


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_gradients_against_fp64(config, corpus, dropout, biases):
    config = dataclasses.replace(config, dropout=dropout, biases=biases)
    ours, twin = make(GPT, config, corpus), make(Twin, config, corpus)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), twin.parameters(), strict=True))
    exact = copy.deepcopy(twin).double()
    batch = batch_of(corpus, config)
    loss, found = gradients(ours, *batch)
    expected, wanted = gradients(exact, *batch)
    _, torchs = gradients(twin, *batch)
    assert abs(loss - expected) < 1e-6 * expected
    limits = errors(torchs, wanted)
    for name, error in errors(found, wanted).items():
        assert error < max(2 * limits[name], 2e-6), name


def test_twenty_steps_like_torch(config, corpus):
    """Same weights, batches and dropout masks: the losses of every step agree."""
    runs = [
        Run(engine(make(kind, config, corpus), config.batch), corpus, config, seed=0).train()
        for kind, engine in (
            (GPT, lambda m, b: MiniTritonEngine(m, b, graph=corpus.train.is_cuda)),
            (Twin, TorchEngine),
        )
    ]
    ours, theirs = (run.losses for run in runs)
    assert len(ours) == config.steps and theirs[-1] < theirs[0] - 0.3
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-5
    for mine, other in zip(runs[0].evaluations, runs[1].evaluations, strict=True):
        assert mine == pytest.approx(other, abs=1e-5)


def test_bf16_stays_near_fp32(config, corpus):
    config = dataclasses.replace(config, steps=6)
    engine = MiniTritonEngine(make(GPT, config, corpus, "bf16"), config.batch, graph=False)
    twin = TorchEngine(make(Twin, config, corpus, "bf16"), config.batch)
    ours, theirs = (Run(e, corpus, config, seed=0).train().losses for e in (engine, twin))
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 5e-3
    low = engine.model.layers[0].qkv
    assert torch.equal(low.low, low.weight.bfloat16()) and low.weight.grad.dtype == torch.float32


def test_equal_bits_every_time_and_after_a_resumption(config, corpus, tmp_path):
    config = dataclasses.replace(config, steps=8, eval_every=4)

    def run(folder=None):
        engine = MiniTritonEngine(make(GPT, config, corpus), config.batch, graph=False)
        return Run(engine, corpus, config, seed=0, folder=folder, identity={"seed": 0}, save_every=3)

    whole = run().train()
    assert run(tmp_path).train(until=4).losses == whole.losses[:4]
    resumed = run(tmp_path)
    resumed.resume()
    assert resumed.done == 4
    assert resumed.train().losses == whole.losses
    assert resumed.record.evaluations == whole.evaluations


@pytest.mark.gpu
def test_a_graph_changes_no_bit(config, corpus, device):
    if device != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    losses = [
        Run(
            MiniTritonEngine(make(GPT, config, corpus, "bf16"), config.batch, graph=graph), corpus,
            config, seed=0,
        ).train().losses
        for graph in (False, True)
    ]  # fmt: skip
    assert losses[0] == losses[1]


def test_learning_rate():
    config = CONFIGS["shakespeare"]
    rates = [learning_rate(config, step) for step in range(config.steps + 1)]
    assert rates[0] == pytest.approx(1e-3 / 101) and max(rates) == rates[config.warmup] == 1e-3
    assert rates[-1] == pytest.approx(1e-4) and rates[config.warmup :] == sorted(
        rates[config.warmup :], reverse=True
    )


def test_evaluation_leaves_no_trace(config, corpus):
    model = make(GPT, config, corpus)
    first, seeds = evaluate(model, corpus.validation, 1, 4), model.seeds.clone()
    assert first == evaluate(model, corpus.validation, 1, 4) and model.training
    assert torch.equal(seeds, model.seeds) and all(p.grad is None for p in model.parameters())
