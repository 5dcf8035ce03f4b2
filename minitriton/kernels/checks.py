"""Refusals that the kernel library makes before any launch; each names the argument and the fix."""

from __future__ import annotations

import torch

from minitriton.ir.diagnostics import MiniTritonError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class KernelArgumentError(MiniTritonError, ValueError):
    """An argument of a library function does not fit."""


def float_tensor(name: str, value: object) -> torch.Tensor:
    """`value` if it is a dense fp32, bf16 or fp16 tensor of rank >= 1."""
    if not isinstance(value, torch.Tensor):
        raise KernelArgumentError(
            f"argument '{name}': expected a tensor, got {type(value).__name__}"
        )
    if value.dtype not in FLOATS:
        raise KernelArgumentError(
            f"argument '{name}': dtype {value.dtype} is not supported; "
            "convert it to float32, bfloat16 or float16"
        )
    if value.layout is not torch.strided:
        raise KernelArgumentError(f"argument '{name}': layout {value.layout}; use .to_dense()")
    if value.dim() == 0:
        raise KernelArgumentError(f"argument '{name}': a scalar; it needs at least one dimension")
    return value


def like(name: str, value: object, other_name: str, other: torch.Tensor) -> torch.Tensor:
    """`value` if it is a tensor of the shape, dtype and device of `other`."""
    tensor = float_tensor(name, value)
    for what in ("shape", "dtype", "device"):
        mine, wanted = getattr(tensor, what), getattr(other, what)
        if mine != wanted:
            shown = tuple(mine) if what == "shape" else mine
            expected = tuple(wanted) if what == "shape" else wanted
            raise KernelArgumentError(
                f"argument '{name}': {what} {shown} differs from that of '{other_name}', {expected}"
            )
    return tensor


def positive(name: str, value: object) -> float:
    """`value` as a float if it is a finite number above zero."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 < value < float("inf")
    ):
        raise KernelArgumentError(f"argument '{name}': must be a positive number, got {value!r}")
    return float(value)
