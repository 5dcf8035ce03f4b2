"""`triton.runtime.driver.active`: what host code of Triton kernels asks before it launches."""

from __future__ import annotations

import platform

import pytest
import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.runtime import driver
from minitriton.runtime.driver import DeviceProperties


@triton.jit
def double_kernel(x_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(x_ptr + offsets, tl.load(x_ptr + offsets) * 2)


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "is_available", lambda: False)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    found = DeviceProperties(1, "H200", (9, 0), 132, 232448, 50 << 20, 141 << 30)
    monkeypatch.setattr(driver, "is_available", lambda: True)
    monkeypatch.setattr(driver, "properties", {1: found}.__getitem__)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


def test_without_a_gpu_tensors_go_to_the_cpu(without_gpu: None) -> None:
    active = triton.runtime.driver.active
    device = active.get_active_torch_device()
    x = torch.ones(16, device=device)
    double_kernel[(1,)](x, 16)
    assert device.type == "cpu" and (x == 2).all()
    target = active.get_current_target()
    assert (target.backend, target.arch) == ("cpu", platform.machine())
    assert active.get_current_stream(0) == 0
    assert active.get_device_interface() is torch.cpu


def test_occupancy_as_tutorials_reckon(without_gpu: None) -> None:
    found = triton.runtime.driver.active.utils.get_device_properties(None)
    kernel = double_kernel.warmup(torch.ones(16), 16, num_warps=8, grid=(1,))
    kernel._init_handles()
    per_program = kernel.n_regs * found["warpSize"] * 8
    assert found["max_num_regs"] // per_program >= 1
    assert 0 <= kernel.metadata.shared == kernel.shared <= found["max_shared_mem"]
    assert found["multiprocessor_count"] >= 1


def test_the_current_gpu(hopper: None) -> None:
    active = triton.runtime.driver.active
    target = active.get_current_target()
    assert (target.backend, target.arch, target.warp_size) == ("cuda", 90, 32)
    assert active.get_active_torch_device() == torch.device("cuda", 1)
    assert active.utils.get_device_properties(1)["multiprocessor_count"] == 132
    assert active.get_device_interface() is torch.cuda
