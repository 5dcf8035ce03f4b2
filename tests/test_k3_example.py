"""The small K3 model: gradients like plain torch in fp64, and three ways to compute that agree."""

import pytest
import torch

from examples.k3.__main__ import compare_decoding, compare_gradients
from examples.k3.layers import Config
from examples.k3.model import Stack


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    torch.manual_seed(1)
    return request.param


def make(device, tokens):
    """A KDA layer with a dense perceptron, and an MLA layer with experts."""
    config = Config(layers=2, block=1)
    return Stack(config).to(device), torch.randn(2, tokens, config.width, device=device)


def test_gradients(device):
    output, gradient = compare_gradients(*make(device, 17))
    assert output < 1e-5 and gradient < 1e-4


def test_prefill_and_decoding_agree(device):
    model, x = make(device, 70)
    assert compare_decoding(model, x, 66) < 1e-5  # over the end of a chunk and a page
    assert compare_decoding(model, x[:, :3], 0) < 1e-5
