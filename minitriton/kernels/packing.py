"""Packed sequences: the one check of their bounds, cu_seqlens, and their way to the device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from minitriton.kernels import checks
from minitriton.kernels.checks import KernelArgumentError


def count_sequences(cu_seqlens: object, x: torch.Tensor, name: str = "q") -> int:
    """How many sequences there are in x [B, T, ...]: B, or with cu_seqlens [N + 1] N >= 1.

    KernelArgumentError, in which `name` is that of x, for bounds that do not fit; their values are
    the matter of `check_bounds`.
    """
    if cu_seqlens is None:
        return x.shape[0]
    device = cu_seqlens.device if isinstance(cu_seqlens, torch.Tensor) else x.device
    bounds = checks.integers("cu_seqlens", cu_seqlens, None, device)
    if bounds.dim() != 1 or bounds.shape[0] < 2:
        raise KernelArgumentError(
            f"argument 'cu_seqlens': shape {tuple(bounds.shape)}; it must be [N + 1] with N >= 1"
        )
    if x.shape[0] != 1:
        raise KernelArgumentError(
            f"argument 'cu_seqlens': packed sequences need a batch of 1; '{name}' has {x.shape[0]}"
        )
    if device not in (x.device, torch.device("cpu")):
        raise KernelArgumentError(
            f"argument 'cu_seqlens': device {device}; it must be {x.device} or the CPU"
        )
    return bounds.shape[0] - 1


def check_bounds(bounds: Sequence[int], tokens: int) -> None:
    """KernelArgumentError unless the bounds rise from 0 to `tokens`."""
    if bounds[0] != 0 or bounds[-1] != tokens:
        raise KernelArgumentError(
            f"argument 'cu_seqlens': runs from {bounds[0]} to {bounds[-1]}; it must run from 0 to "
            f"the {tokens} tokens"
        )
    for i, (before, after) in enumerate(pairwise(bounds)):
        if before > after:
            raise KernelArgumentError(
                f"argument 'cu_seqlens': falls from {before} to {after} at index {i + 1}; it must "
                "not decrease"
            )


def bounds_on(device: torch.device, cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """The bounds on `device`; those on the CPU are checked, as that costs no wait for a GPU."""
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        check_bounds(cu_seqlens.tolist(), tokens)
    return cu_seqlens.to(device).contiguous()
