"""Text from a model: classes by their probabilities, within the context, the same every time."""

import pytest
import torch

from examples.nanogpt.data import DataError
from examples.nanogpt.model import GPT
from examples.nanogpt.sample import choose, generate
from tests.nanogpt.models import make


def test_classes_come_by_their_probabilities(device):
    logits = torch.tensor([1.0, 0.0, 2.0, 9.0], device=device).expand(500, 4).contiguous()
    chosen = choose(logits, 3, temperature=0.7, seed=1, step=3).long()  # the fourth is no class
    shares = torch.bincount(chosen.cpu(), minlength=4) / 500
    expected = torch.softmax(torch.tensor([1.0, 0.0, 2.0]) / 0.7, 0)
    assert (shares[:3] - expected).abs().max() < 0.07 and shares[3] == 0
    assert not torch.equal(chosen, choose(logits, 3, 0.7, seed=1, step=4))


def test_nearly_no_temperature_takes_the_best(device):
    logits = torch.randn(7, 1500, device=device)
    assert torch.equal(choose(logits, 1500, 1e-4, 0, 0).long(), logits.argmax(-1))


def test_text_goes_on_beyond_the_context(small, corpus):
    model = make(GPT, small, corpus)
    start = "one two, then\n"
    text = generate(model, corpus.tokeniser, start, 4, seed=3)
    assert text.startswith(start) and len(text) == len(start) + 4 and model.training
    assert text == generate(model, corpus.tokeniser, start, 4, seed=3)


def test_what_cannot_be_continued(small, corpus):
    model = make(GPT, small, corpus)
    with pytest.raises(
        DataError, match="17 tokens to continue; the model's context is 16: shorten"
    ):
        generate(model, corpus.tokeniser, "o" * 17, 1)
    with pytest.raises(DataError, match=r"characters that the corpus does not have: \['Q'\]"):
        generate(model, corpus.tokeniser, "Q", 1)
    with pytest.raises(ValueError, match="17 tokens; the model's context is 16"):
        model.logits(corpus.train[:17][None])
