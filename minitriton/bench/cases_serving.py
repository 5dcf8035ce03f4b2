"""More of the library that serves: one token of the convolution, MLA's absorbed products, MXFP4."""

from __future__ import annotations

from typing import Any

import torch

from minitriton import kernels
from minitriton.bench import cases
from minitriton.bench.cases import Case, Setting, Trial, normal, one
from minitriton.bench.functions import Function, empty
from minitriton.bench.roofline import Work


def short_conv_step(setting: Setting, batch: int, channels: int) -> Case:
    """One token a sequence; the last three inputs move on in place."""
    x, weight = empty(setting, batch, channels), empty(setting, channels, 4)
    state = empty(setting, batch, 3, channels)

    def refill() -> None:
        normal(x, state)()
        normal(weight, scale=0.5)()

    def in_place(function: Any) -> Any:
        own = torch.empty_like(state)
        call = lambda: [function(x, weight, own), own]  # noqa: E731
        return lambda: [Trial("in place", call, restore=lambda: own.copy_(state))]

    def reference() -> list[torch.Tensor]:
        moved = state.float()
        return [kernels.short_conv_step_reference(x.float(), weight.float(), moved), moved]

    contenders = {
        "minitriton library": in_place(kernels.short_conv_step),
        "torch": in_place(kernels.short_conv_step_reference),
    }
    n = x.numel()
    return Case(Work(16.0 * n + 8 * channels, 10.0 * n), refill, reference, contenders)


def mla_absorb(setting: Setting, batch: int, heads: int) -> Case:
    """Queries of a decoding step into the latent space: a product of its own for each head."""
    q, shared = empty(setting, batch, 1, heads, 128), empty(setting, batch, 1, heads, 64)
    weight = empty(setting, heads, 128, 512)

    def refill() -> None:
        normal(q, shared)()
        normal(weight, scale=128**-0.5)()

    function = Function(
        [q, weight, shared], refill, (batch, 1, heads, 576), kernels.mla_absorb_query_reference,
        {"minitriton library": lambda: kernels.mla_absorb_query},
        plain=kernels.mla_absorb_query_reference,
    )  # fmt: skip
    moved = 2.0 * (batch * heads * (128 + 64 + 576) + weight.numel())
    return function.forward(Work(moved, 2.0 * batch * weight.numel(), "bf16"))


def mla_value_up(setting: Setting, batch: int, heads: int) -> Case:
    """Results of a decoding step out of the latent space, under the output gate."""
    latent, gate = empty(setting, batch, 1, heads, 512), empty(setting, batch, 1, heads, 128)
    weight = empty(setting, heads, 128, 512)

    def refill() -> None:
        normal(latent, gate)()
        normal(weight, scale=512**-0.5)()

    function = Function(
        [latent, weight, gate], refill, tuple(gate.shape), kernels.mla_value_up_reference,
        {"minitriton library": lambda: kernels.mla_value_up},
        plain=kernels.mla_value_up_reference,
    )  # fmt: skip
    moved = 2.0 * (batch * heads * (512 + 2 * 128) + weight.numel())
    return function.forward(Work(moved, 2.0 * batch * weight.numel(), "bf16"), bound=1e-2)


def mxfp4_quantize(setting: Setting, rows: int, columns: int) -> Case:
    """Codes and scales, which must be those of the reference."""
    weight = empty(setting, rows, columns)
    plain = kernels.mxfp4_quantize_reference
    contenders: dict[str, Any] = {
        "minitriton library": one(lambda: kernels.mxfp4_quantize(weight)),
        "torch": one(lambda: plain(weight)),
        "torch.compile": cases.compiled(plain, weight),
    }
    n = weight.numel()

    def reference() -> list[torch.Tensor]:
        return [x.float() for x in plain(weight)]

    work = Work(2.0 * n + n * 4.25 / 8, 4.0 * n)
    return Case(work, normal(weight), reference, contenders, bound=0.0)
