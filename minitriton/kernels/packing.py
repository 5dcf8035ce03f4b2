"""Bounds of packed sequences (cu_seqlens) for kernels that read them on the device."""

from __future__ import annotations

from itertools import pairwise

import torch

from minitriton.kernels.checks import KernelArgumentError


def bounds_on(device: torch.device, cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """The bounds on `device`; those on the CPU are checked, as that costs no wait for a GPU."""
    if cu_seqlens.device.type == "cpu":
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds[-1] != tokens or any(a > b for a, b in pairwise(bounds)):
            raise KernelArgumentError(
                f"argument 'cu_seqlens': {bounds}; it must rise from 0 to the {tokens} tokens"
            )
    return cu_seqlens.to(device).contiguous()
