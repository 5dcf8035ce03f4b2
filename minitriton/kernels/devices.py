"""What a device offers, for the choice of tiles."""

from __future__ import annotations

import functools

import torch

from minitriton import options


def since_hopper(x: torch.Tensor) -> bool:
    """Whether x lies on a GPU of compute capability 9.0 or later; the emulator counts as older."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)


def has_warpgroups(device: torch.device) -> bool:
    """Whether 16-bit products run on wgmma there (sm_90a), which changes what tiles are best."""
    found = _is_hopper(device)
    return options.read().target == "sm_90a" if found is None else found


@functools.cache
def _is_hopper(device: torch.device) -> bool | None:
    """None where no GPU is: the emulator may be told something else from call to call."""
    return torch.cuda.get_device_capability(device) == (9, 0) if device.type == "cuda" else None


@functools.cache
def processors(device: torch.device) -> int:
    """SMs of the device; the emulator plans for the 132 of an H100 or H200."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count
