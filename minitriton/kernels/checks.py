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
    if tensor.shape != other.shape:
        raise differs("shape", name, tensor, other_name, other)
    return alike(name, tensor, other_name, other)


def like_but_shape(name: str, value: object, other_name: str, other: torch.Tensor) -> torch.Tensor:
    """`value` if it is a tensor of the dtype and device of `other`."""
    return alike(name, float_tensor(name, value), other_name, other)


def alike(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> torch.Tensor:
    """`tensor`, whose kind was checked, if it is of the dtype and device of `other`."""
    if tensor.dtype != other.dtype:
        raise differs("dtype", name, tensor, other_name, other)
    if tensor.device != other.device:
        raise differs("device", name, tensor, other_name, other)
    return tensor


def differs(
    what: str, name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor
) -> KernelArgumentError:
    """The refusal of a tensor whose shape, dtype or device (`what`) is not that of another."""
    mine, wanted = getattr(tensor, what), getattr(other, what)
    if what == "shape":
        mine, wanted = tuple(mine), tuple(wanted)
    return KernelArgumentError(
        f"argument '{name}': {what} {mine} differs from that of '{other_name}', {wanted}"
    )


def integers(
    name: str, value: object, shape: torch.Size | None, device: torch.device
) -> torch.Tensor:
    """`value` if it is an int64 or int32 tensor of rank >= 1, of this shape, on this device."""
    if not isinstance(value, torch.Tensor) or value.dtype not in (torch.int64, torch.int32):
        found = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        raise KernelArgumentError(
            f"argument '{name}': must be a tensor of int64 or int32, got {found}"
        )
    if value.dim() == 0 or (shape is not None and value.shape != shape):
        wanted = "at least one dimension" if shape is None else tuple(shape)
        raise KernelArgumentError(
            f"argument '{name}': shape {tuple(value.shape)}; it must have {wanted}"
        )
    if value.device != device:
        raise KernelArgumentError(f"argument '{name}': device {value.device}; it must be {device}")
    return value


def row_vector(name: str, value: object, other_name: str, other: torch.Tensor) -> torch.Tensor:
    """`value` if it is a vector for the rows of `other`, in fp32 or its dtype, on its device."""
    tensor = float_tensor(name, value)
    if tensor.shape != other.shape[-1:]:
        raise KernelArgumentError(
            f"argument '{name}': shape {tuple(tensor.shape)}; it must be {tuple(other.shape[-1:])},"
            f" the last dimension of '{other_name}'"
        )
    if tensor.dtype not in (torch.float32, other.dtype):
        raise KernelArgumentError(
            f"argument '{name}': dtype {tensor.dtype}; it must be torch.float32 or that of "
            f"'{other_name}', {other.dtype}"
        )
    if tensor.device != other.device:
        raise differs("device", name, tensor, other_name, other)
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


def vector(name: str, value: object, other_name: str, other: torch.Tensor) -> torch.Tensor:
    """`value` if it is a float tensor [d] on the device of `other`, whose last dimension is d."""
    tensor = float_tensor(name, value)
    if tensor.shape != other.shape[-1:]:
        raise KernelArgumentError(
            f"argument '{name}': shape {tuple(tensor.shape)}; '{other_name}' of shape "
            f"{tuple(other.shape)} needs {tuple(other.shape[-1:])}"
        )
    if tensor.device != other.device:
        raise differs("device", name, tensor, other_name, other)
    return tensor


def no_gradient(instead: str, **tensors: object) -> None:
    """Refuses tensors that autograd would follow into a function without a backward pass."""
    for name, value in tensors.items():
        parts = value if isinstance(value, list | tuple) else (value,)
        wanted = any(isinstance(part, torch.Tensor) and part.requires_grad for part in parts)
        if wanted and torch.is_grad_enabled():
            raise KernelArgumentError(
                f"argument '{name}': requires a gradient, but this function has no backward pass; "
                f"{instead}"
            )


def whole(name: str, value: object, most: int) -> int:
    """`value` if it is a whole number from 1 to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise KernelArgumentError(
            f"argument '{name}': must be a whole number from 1 to {most}, got {value!r}"
        )
    return value


def fraction(name: str, value: object) -> float:
    """`value` as a float if it is a number in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise KernelArgumentError(f"argument '{name}': must be in [0, 1), got {value!r}")
    return float(value)
