"""Gradient accumulation: sums of gradients over several backward passes, in one flat buffer.

autograd would add gradients by itself, one kernel for each parameter; here 32 parameters share a
launch, and data-parallel processes can exchange the whole sum in one message.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels.chunks import CHUNK, Chunks, gradient_chunk


@triton.jit
def _add_kernel(
    grads, sum_ptr, tensor_ptr, first_ptr, size_ptr, chunks, base, present: tl.int64,
    FRESH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    chunk = chunks + tl.program_id(0)
    _, _, grad, _ = gradient_chunk(
        grads, present, chunk, tensor_ptr, first_ptr, size_ptr, base, CHUNK
    )
    at = sum_ptr + chunk.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    if not FRESH:
        grad += tl.load(at)
    tl.store(at, grad)


class GradientSum:
    """Sums of the gradients of some parameters, in fp32 and in the order of the calls.

    params: fp32, on one device. flat: the sums, one after the other with zeros between, to be
    exchanged between processes before `give`. CUDA graphs capture `add` and `give`.
    KernelArgumentError for parameters that do not fit.
    """

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        self._chunks = Chunks(list(params))
        self.flat = self._chunks.new()
        self._fresh = True

    @torch.no_grad()
    def add(self) -> None:
        """Takes every parameter's gradient into its sum and leaves None in its place."""
        for grads, base, present, chunk, count in self._chunks.launches(self.flat):
            _add_kernel[(count,)](
                grads, self.flat, *self._chunks.tables, chunk, base, present, FRESH=self._fresh,
                CHUNK=CHUNK,
            )  # fmt: skip
        self._fresh = False
        for p in self._chunks.params:
            p.grad = None

    def give(self) -> None:
        """Makes the sums the gradients, as views; set them to None before the next `add`, which
        begins anew."""
        for i, p in enumerate(self._chunks.params):
            p.grad = self._chunks.view(self.flat, i)
        self._fresh = True
