"""Many gradients in few launches: parameters in chunks, 32 gradients at a time as pointers."""

from __future__ import annotations

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels.checks import KernelArgumentError

CHUNK = 2048  # elements that a program handles; every parameter begins at a multiple
FAN = 32  # gradients per launch
Launch = tuple[tuple[torch.Tensor, ...], int, int, int, int]


@triton.jit
def gradient_chunk(
    grads, present, chunk, tensor_ptr, first_ptr, size_ptr, base, CHUNK: tl.constexpr
):
    """A chunk's parameter, its elements, its gradient, and where there is one."""
    tensor = tl.load(tensor_ptr + chunk)
    local = tensor - base
    source = grads[0]
    for i in tl.static_range(1, len(grads)):
        source = tl.where(local == i, grads[i], source)
    at = tl.load(first_ptr + chunk) + tl.arange(0, CHUNK)
    mask = (at < tl.load(size_ptr + tensor)) & (((present >> local) & 1) != 0)
    return tensor, at, tl.load(source + at, mask=mask, other=0.0), mask


class Chunks:
    """fp32 parameters of one device, each at a multiple of CHUNK in flat buffers of `size`.

    tables: of each chunk its parameter and its first element there, of each parameter its elements.
    KernelArgumentError for parameters that do not fit, or none.
    """

    def __init__(self, params: list[torch.Tensor]) -> None:
        _check_params(params)
        self.params = params
        counts = [triton.cdiv(p.numel(), CHUNK) for p in params]
        self.first = [sum(counts[:i]) for i in range(len(counts) + 1)]
        self.count, self.size = self.first[-1], self.first[-1] * CHUNK
        numbers = (
            ([i for i, n in enumerate(counts) for _ in range(n)], torch.int32),
            ([CHUNK * j for n in counts for j in range(n)], torch.int64),
            ([p.numel() for p in params], torch.int64),
        )
        device = params[0].device
        self.tables = tuple(torch.tensor(x, dtype=dtype, device=device) for x, dtype in numbers)

    def new(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A flat buffer of zeros."""
        return torch.zeros(self.size, dtype=dtype, device=self.params[0].device)

    def view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """A parameter's part of a flat buffer, in the parameter's shape."""
        p, begin = self.params[index], self.first[index] * CHUNK
        return flat[begin : begin + p.numel()].view(p.shape)

    def launches(self, absent: torch.Tensor) -> list[Launch]:
        """Of each launch: gradients (`absent` where there is none), first parameter, a bit for each
        gradient that is there, first chunk and number of chunks."""
        found = []
        for base in range(0, len(self.params), FAN):
            part = self.params[base : base + FAN]
            grads = [absent if p.grad is None else _dense(p) for p in part]
            present = sum(1 << i for i, p in enumerate(part) if p.grad is not None)
            first, last = self.first[base], self.first[base + len(part)]
            padded = (*grads, *[grads[0]] * (FAN - len(grads)))
            found.append((padded, base, present, first, last - first))
        return found


def _dense(p: torch.Tensor) -> torch.Tensor:
    assert p.grad is not None
    if p.grad.is_sparse:
        raise KernelArgumentError("argument 'params': sparse gradients; use dense ones")
    return p.grad.contiguous()


def _check_params(params: list[torch.Tensor]) -> None:
    if not params:
        raise KernelArgumentError("argument 'params': no parameters")
    for p in params:
        if p.dtype != torch.float32:
            raise KernelArgumentError(
                f"argument 'params': dtype {p.dtype}; parameters must be float32 masters"
            )
        if p.device != params[0].device:
            raise KernelArgumentError(
                f"argument 'params': devices {params[0].device} and {p.device}; use one"
            )
