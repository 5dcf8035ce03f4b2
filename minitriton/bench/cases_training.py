"""More of the library that trains: packed attention, residuals, Muon's step, the router's bias."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn import functional as F

from minitriton import kernels
from minitriton.bench.cases import Case, Setting, Trial, normal, one
from minitriton.bench.functions import Function, empty
from minitriton.bench.roofline import Work

LEARNING_RATE = 0.05  # large, so that the step shows beside the weight


def packed_attention(setting: Setting, batch: int, tokens: int, heads: int, width: int,
                     backward: bool = False) -> Case:  # fmt: skip
    """Causal, of one tensor with the queries of all heads, their keys and their values."""
    qkv = empty(setting, batch, tokens, 3 * heads * width)

    def plain(qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.unflatten(2, (heads, width)).transpose(1, 2) for x in qkv.chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).flatten(2)

    function = Function(
        [qkv], normal(qkv), (batch, tokens, heads * width),
        lambda x: kernels.packed_attention_reference(x, heads),
        {"minitriton library": lambda: functools.partial(kernels.packed_attention, heads=heads)},
        plain=plain,
    )  # fmt: skip
    n = batch * tokens * heads * width
    flop = 2.0 * n * tokens
    return function.case(
        (8 * n, 16 * n), (flop, 2.5 * flop), "bf16", backward=backward, bounds=(1e-2, 2e-2)
    )


def scalar_residual(setting: Setting, rows: int, columns: int, backward: bool = False) -> Case:
    x, skip = (empty(setting, rows, columns) for _ in range(2))
    alpha = empty(setting, 1, dtype=torch.float32)
    inputs = [x, skip, alpha]
    # fp32 alpha makes torch's sum fp32: the result is rounded as ours is
    plain = lambda x, skip, alpha: kernels.scalar_residual_reference(x, skip, alpha).to(x.dtype)  # noqa: E731
    function = Function(
        inputs, normal(*inputs), (rows, columns), kernels.scalar_residual_reference,
        {"minitriton library": lambda: kernels.scalar_residual}, plain=plain,
    )  # fmt: skip
    n = x.numel()
    return function.case((6 * n, 6 * n), (2 * n, 3 * n), backward=backward, bounds=(8e-3, 5e-2))


def muon_step(setting: Setting, heads: int, rows: int, columns: int) -> Case:
    """A matrix of `heads` blocks [rows, columns], in place; operations as for `muon`."""
    weight = empty(setting, heads * rows, columns, dtype=torch.float32)
    grad, momentum = (empty(setting, heads * rows, columns) for _ in range(2))

    def refill() -> None:
        normal(weight, scale=0.01)()
        normal(grad, momentum)()

    def plain(*tensors: torch.Tensor) -> list[torch.Tensor]:
        weight, grad, momentum = tensors
        rate = LEARNING_RATE
        return list(kernels.muon_step_reference(weight, grad, momentum, rate, heads=heads))

    def library() -> list[Trial]:
        own = [torch.empty_like(weight), torch.empty_like(momentum)]

        def restore() -> None:
            own[0].copy_(weight)
            own[1].copy_(momentum)

        def call() -> list[torch.Tensor]:
            kernels.muon_step_(own[0], grad, own[1], LEARNING_RATE, heads=heads)
            return own

        return [Trial("in place", call, restore=restore)]

    def reference() -> list[torch.Tensor]:
        return [x.float() for x in plain(weight.double(), grad.double(), momentum.double())]

    contenders: dict[str, Any] = {
        "minitriton library": library, "torch": one(lambda: plain(weight, grad, momentum)),
    }  # fmt: skip
    n = weight.numel()  # the weight and the momentum are read and written
    return Case(Work(14.0 * n, 4.0 * n * rows, "bf16"), refill, reference, contenders, bound=4e-2)


def quantile_bias(setting: Setting, tokens: int, experts: int, chosen: int = 16) -> Case:
    """The router's bias after a step, from the scores and cutoffs of all its tokens."""
    scores = empty(setting, tokens, experts, dtype=torch.float32)
    bias = empty(setting, experts, dtype=torch.float32)

    def refill() -> None:
        normal(bias, scale=0.05)()
        scores.uniform_()

    contenders: dict[str, Any] = {
        "minitriton library": one(lambda: kernels.quantile_bias(scores, bias, chosen)),
        "torch": one(lambda: kernels.quantile_bias_reference(scores, bias, chosen)),
    }
    reference = lambda: [kernels.quantile_bias_reference(scores.double(), bias, chosen).float()]  # noqa: E731
    n = scores.numel()
    return Case(Work(4.0 * n, 8.0 * n), refill, reference, contenders, bound=1e-4)
