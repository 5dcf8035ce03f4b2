"""Runs of a tiny model, in the emulator or on a GPU."""

import dataclasses

import pytest
import torch

from examples.nanogpt.config import CONFIGS
from examples.nanogpt.data import make_corpus


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return request.param


@pytest.fixture(scope="session")
def text():
    """Some thousand characters with structure to learn: counting, in words."""
    ones = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    return "".join(f"{ones[i // 10 % 10]} {ones[i % 10]}, then\n" for i in range(400))


@pytest.fixture
def config():
    return dataclasses.replace(CONFIGS["tiny"], eval_batches=1)


@pytest.fixture
def small(config):
    """The least that still has every part: for tests in which numbers do not matter."""
    return dataclasses.replace(config, layers=1, context=16, batch=1)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """torch's other threads would only spin: its tensors here are tiny."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def unchecked(monkeypatch):
    """The emulator without its checks, which the kernels' own tests have: a fifth faster."""
    monkeypatch.setenv("MINITRITON_CHECK", "none")


@pytest.fixture
def corpus(text, config, device, unchecked):
    return make_corpus(text, config.context, by_byte=False, device=device)
