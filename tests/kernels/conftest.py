"""Kernel tests run where `device` says: in the emulator under both landings, and on a GPU.

The same tests serve as the GPU suite: `pytest -m gpu tests/kernels`.
"""

import pytest
import torch


@pytest.fixture(
    params=["cpu-late", "cpu-early", pytest.param("cuda", marks=pytest.mark.gpu)], autouse=True
)
def device(request, monkeypatch):
    """Device of the tensors; async copies land late or early in the emulator, all checks on."""
    torch.manual_seed(1234)
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no GPU")
        return "cuda"
    monkeypatch.setenv("MINITRITON_LANDING", request.param.removeprefix("cpu-"))
    monkeypatch.setenv("MINITRITON_CHECK", "all")
    return "cpu"
