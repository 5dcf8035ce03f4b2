"""The model trains like its torch twin, gradient by gradient and step by step, and repeatably."""

import dataclasses

import pytest
import torch

from examples.nanogpt.config import CONFIGS
from examples.nanogpt.engine import MiniTritonEngine, TorchEngine, evaluate, learning_rate
from examples.nanogpt.masks import attention_mask, element_mask
from examples.nanogpt.model import GPT
from examples.nanogpt.train import Run
from examples.nanogpt.twin import Twin, draw
from minitriton.kernels.attention_tiles import attention_dropout_mask
from minitriton.kernels.dropout import keep_mask
from tests.nanogpt.models import batch_of, errors, gradients, in_fp64, make


@pytest.mark.parametrize(("dropout", "biases"), [(0.0, False), (0.2, True)])
def test_gradients_against_fp64(config, corpus, dropout, biases):
    config = dataclasses.replace(config, dropout=dropout, biases=biases)
    ours, twin = (make(kind, config, corpus, trained=True) for kind in (GPT, Twin))
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), twin.parameters(), strict=True))
    batch = batch_of(corpus, config)
    loss, found = gradients(ours, *batch)
    expected, wanted = gradients(in_fp64(twin), *batch)
    _, torchs = gradients(twin, *batch)
    assert abs(loss - expected) < 1e-6 * expected
    limits = errors(torchs, wanted)
    for name, error in errors(found, wanted).items():
        assert error < max(2 * limits[name], 2e-6), name


def test_twenty_steps_like_torch(config, corpus):
    """Same weights, batches and dropout masks: the losses of every step agree."""
    config = dataclasses.replace(config, eval_every=20)
    engines = (
        MiniTritonEngine(make(GPT, config, corpus), config.batch, graph=corpus.train.is_cuda),
        TorchEngine(make(Twin, config, corpus)),
    )
    ours, theirs = (Run(engine, corpus, config, seed=0).train() for engine in engines)
    assert len(ours.losses) == config.steps and theirs.losses[-1] < theirs.losses[0] - 0.2
    assert max(abs(a - b) for a, b in zip(ours.losses, theirs.losses, strict=True)) < 1e-5
    for mine, other in zip(ours.evaluations, theirs.evaluations, strict=True):
        assert mine == pytest.approx(other, abs=1e-5)


def test_bf16_stays_near_torch(config, corpus):
    config = dataclasses.replace(config, steps=3)
    engine = MiniTritonEngine(make(GPT, config, corpus, "bf16"), config.batch, graph=False)
    twin = TorchEngine(make(Twin, config, corpus, "bf16"))
    ours, theirs = (Run(e, corpus, config, seed=0).train().losses for e in (engine, twin))
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 5e-3
    low = engine.model.layers[0].qkv
    assert torch.equal(low.low, low.weight.bfloat16()) and low.weight.grad.dtype == torch.float32


def test_parts_of_a_batch_count_like_a_whole(small, corpus):
    """Without dropout: masks are drawn for each part."""
    config = dataclasses.replace(small, batch=2, steps=2, dropout=0.0)
    losses = []
    for kind, engine, parts in ((GPT, _ours, 1), (GPT, _ours, 2), (Twin, TorchEngine, 2)):
        changed = dataclasses.replace(config, accumulate=parts)
        run = Run(engine(make(kind, changed, corpus)), corpus, changed, seed=0)
        losses.append(run.train().losses)
    for others in losses[1:]:
        assert others == pytest.approx(losses[0], abs=1e-5)


def _ours(model):
    return MiniTritonEngine(model, model.config.batch, graph=False)


def test_equal_bits_every_time_and_after_a_resumption(small, corpus, tmp_path):
    config = dataclasses.replace(small, steps=4, eval_every=2)

    def run(folder=None):
        engine = _ours(make(GPT, config, corpus, "bf16"))
        return Run(engine, corpus, config, seed=0, folder=folder, identity={"seed": 0})

    whole = run().train()
    assert run(tmp_path).train(until=2).losses == whole.losses[:2]
    resumed = run(tmp_path)
    resumed.resume()
    assert resumed.done == 2
    assert resumed.train().losses == whole.losses
    assert resumed.record.evaluations == whole.evaluations


@pytest.mark.gpu
def test_a_graph_changes_no_bit(config, corpus, device):
    if device != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    for accumulate in (1, 2):
        config = dataclasses.replace(config, accumulate=accumulate)
        losses = [
            Run(
                MiniTritonEngine(make(GPT, config, corpus, "bf16"), config.batch, graph=graph),
                corpus, config, seed=0,
            ).train().losses
            for graph in (False, True)
        ]  # fmt: skip
        assert losses[0] == losses[1]


def test_masks_of_the_twin(device):
    seed = torch.tensor([2**40 + 5], device=device)
    for probability in (0.2, 0.7):
        ours = draw(element_mask, seed, 5, 18, probability)
        assert torch.equal(ours, keep_mask(seed, torch.Size((5, 18)), probability))
        ours = draw(attention_mask, seed, 6, 37, 50, probability)
        wanted = attention_dropout_mask(int(seed), (2, 3, 37, 50), probability)
        assert torch.equal(ours.cpu().view(2, 3, 37, 50), wanted)


def test_learning_rate():
    config = CONFIGS["shakespeare"]
    rates = [learning_rate(config, step) for step in range(config.steps + 1)]
    assert rates[0] == pytest.approx(1e-3 / 101) and max(rates) == rates[config.warmup] == 1e-3
    assert rates[-1] == pytest.approx(1e-4) and rates[config.warmup :] == sorted(
        rates[config.warmup :], reverse=True
    )


def test_evaluation_leaves_no_trace(small, corpus):
    model = make(GPT, small, corpus)
    first, seeds = evaluate(model, corpus.validation, 1, 1), model.seeds.clone()
    assert first == evaluate(model, corpus.validation, 1, 1) and model.training
    assert torch.equal(seeds, model.seeds) and all(p.grad is None for p in model.parameters())
