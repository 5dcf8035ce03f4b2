"""Functions of the library without a same-source twin: gates, norms, residuals, products, Muon."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn import functional as F

from minitriton import kernels
from minitriton.bench import cases
from minitriton.bench.cases import Case, Setting, Trial, exact_fp32, normal, one, peer
from minitriton.bench.functions import Body, Function, empty, slow_to_tune
from minitriton.bench.roofline import Work

EPS = 1e-5


def situ_glu(setting: Setting, rows: int, columns: int, backward: bool = False) -> Case:
    """Gate and up are halves of one tensor, as a product leaves them."""
    both = empty(setting, rows, 2 * columns)
    function = Function(
        list(both.chunk(2, dim=-1)), normal(both), (rows, columns), kernels.situ_glu_reference,
        {"minitriton library": lambda: kernels.situ_glu}, plain=kernels.situ_glu_reference,
    )  # fmt: skip
    n = rows * columns
    return function.case((6 * n, 10 * n), (12 * n, 30 * n), backward=backward)


def situ_linear(
    setting: Setting, rows: int, columns: int, depth: int, backward: bool = False
) -> Case:
    x, w13 = empty(setting, rows, depth), empty(setting, 2 * columns, depth)

    def refill() -> None:
        normal(x)()
        normal(w13, scale=depth**-0.5)()

    function = Function(
        [x, w13], refill, (rows, columns), kernels.situ_glu_linear_reference,
        {"minitriton library": lambda: kernels.situ_glu_linear},
        plain=kernels.situ_glu_linear_reference,
    )  # fmt: skip
    moved = 2.0 * (x.numel() + w13.numel() + rows * columns)
    flop = 2.0 * rows * w13.numel()
    return function.case(
        (moved, 2 * moved), (flop, 2 * flop), "bf16", backward=backward, bounds=(1e-2, 2e-2)
    )


def gated_rms_norm(
    setting: Setting, tokens: int, heads: int, width: int, backward: bool = False
) -> Case:
    x, gate = (empty(setting, tokens, heads, width) for _ in range(2))
    weight = empty(setting, width)

    def fla() -> Body:
        rms_norm_gated = peer("fla.modules.fused_norm_gate", "rms_norm_gated")

        return lambda x, gate, w: rms_norm_gated(x, gate, w, None, "sigmoid", eps=EPS)

    function = Function(
        [x, gate, weight], normal(x, gate, weight), tuple(x.shape),
        kernels.gated_rms_norm_reference,
        {"minitriton library": lambda: kernels.gated_rms_norm, "fla": fla},
        plain=kernels.gated_rms_norm_reference,
    )  # fmt: skip
    n = x.numel()
    return function.case((6 * n, 10 * n), (10 * n, 25 * n), backward=backward)


def attn_res(
    setting: Setting, sources: int, tokens: int, width: int, backward: bool = False
) -> Case:
    """The mix of residual sources, which lie one after the other in memory."""
    stack = empty(setting, sources, tokens, width)
    query, weight = empty(setting, width), empty(setting, width)

    def refill() -> None:
        normal(stack, weight)()
        normal(query, scale=width**-0.5)()

    def ours(*inputs: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = kernels.attn_res_mix(list(inputs[:-2]), inputs[-2], inputs[-1], EPS)
        return mixed

    def plain(*inputs: torch.Tensor) -> torch.Tensor:
        values, (query, weight) = inputs[:-2], inputs[-2:]
        mixed: torch.Tensor = kernels.attn_res_mix_reference(values, query, weight, EPS)
        return mixed

    def fla() -> Body:
        fused_attnres = peer("fla.ops.attnres", "fused_attnres")

        return lambda *x: fused_attnres(x[-2], list(x[:-2]), x[-1], rms_eps=EPS)

    def liger() -> Body:
        liger_attn_res = cases.liger("liger_attn_res")

        return lambda *x: liger_attn_res(stack[:, None], x[-2], x[-1], EPS)

    function = Function(
        [*stack, query, weight], refill, (tokens, width), plain,
        {"minitriton library": lambda: ours, "fla": slow_to_tune(setting, fla), "liger": liger},
        plain=plain,
        forward_only={"liger": "it takes the sources as one tensor, not each for itself"},
    )  # fmt: skip
    row = 2.0 * tokens * width
    moved = ((sources + 1) * row, (2 * sources + 1) * row)
    flop = (4 * sources * row, 10 * sources * row)
    return function.case(moved, flop, backward=backward, bounds=(8e-3, 5e-2))


def _convolution(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    padded = F.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0))
    return F.silu(F.conv1d(padded, weight[:, None], groups=weight.shape[0])).transpose(1, 2)


def short_conv(setting: Setting, tokens: int, channels: int, backward: bool = False) -> Case:
    x, weight = empty(setting, 1, tokens, channels), empty(setting, channels, 4)

    def refill() -> None:
        normal(x)()
        normal(weight, scale=0.5)()

    def fla() -> Body:
        causal_conv1d = peer("fla.modules.convolution", "causal_conv1d")

        return lambda x, w: causal_conv1d(x, w, activation="silu")[0]

    function = Function(
        [x, weight], refill, tuple(x.shape), lambda x, w: kernels.short_conv_reference(x, w)[0],
        {"minitriton library": lambda: lambda x, w: kernels.short_conv(x, w)[0], "fla": fla},
        plain=_convolution,
    )  # fmt: skip
    n = x.numel()
    return function.case((4 * n, 6 * n), (12 * n, 30 * n), backward=backward)


def linear(setting: Setting, rows: int, columns: int, depth: int, backward: bool = False) -> Case:
    """torch.compile would call the same cuBLAS as torch does."""
    x, weight = empty(setting, rows, depth), empty(setting, columns, depth)

    def refill() -> None:
        normal(x)()
        normal(weight, scale=depth**-0.5)()

    function = Function(
        [x, weight], refill, (rows, columns), F.linear,
        {"minitriton library": lambda: kernels.linear, "torch": lambda: F.linear},
    )  # fmt: skip
    moved = 2.0 * (x.numel() + weight.numel() + rows * columns)
    flop = 2.0 * rows * columns * depth
    return function.case(
        (moved, 2 * moved), (flop, 2 * flop), "bf16", backward=backward, bounds=(1e-2, 1e-2)
    )


def gelu_mlp(setting: Setting, rows: int, width: int, backward: bool = False) -> Case:
    """Two products, 4 widths between them, with biases."""
    x = empty(setting, rows, width)
    up, down = empty(setting, 4 * width, width), empty(setting, width, 4 * width)
    up_bias, down_bias = empty(setting, 4 * width), empty(setting, width)

    def refill() -> None:
        normal(x, up_bias, down_bias)()
        normal(up, down, scale=width**-0.5)()

    function = Function(
        [x, up, down, up_bias, down_bias], refill, (rows, width), kernels.gelu_mlp_reference,
        {"minitriton library": lambda: kernels.gelu_mlp}, plain=kernels.gelu_mlp_reference,
    )  # fmt: skip
    flop = 16.0 * rows * width**2
    moved = 2.0 * (2 * x.numel() + 2 * up.numel())
    # what lies between the products is read again for the gradients of their weights
    moves = (moved, 2 * moved + 4.0 * rows * 4 * width)
    return function.case(moves, (flop, 2 * flop), "bf16", backward=backward, bounds=(1e-2, 2e-2))


def add_layer_norm(setting: Setting, rows: int, columns: int, backward: bool = False) -> Case:
    """A sum and its norm: both results are used, the sum as the residual stream."""
    x, branch = (empty(setting, rows, columns) for _ in range(2))
    weight, bias = empty(setting, columns), empty(setting, columns)

    def plain(
        x: torch.Tensor, branch: torch.Tensor, *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + branch
        return total, F.layer_norm(total, (columns,), *parameters, EPS)

    inputs = [x, branch, weight, bias]
    function = Function(
        inputs, normal(*inputs), tuple(x.shape), plain,
        {"minitriton library": lambda: functools.partial(kernels.add_layer_norm, eps=EPS)},
        plain=plain, results=2,
    )  # fmt: skip
    n = x.numel()
    return function.case((8 * n, 10 * n), (9 * n, 16 * n), backward=backward)


def embedding(setting: Setting, tokens: int, rows: int, width: int, backward: bool = False) -> Case:
    """Tokens and positions; sequences of 1024 tokens."""
    length = min(1024, tokens)
    ids = torch.zeros(tokens // length, length, device=setting.device, dtype=torch.int64)
    weight, positions = empty(setting, rows, width), empty(setting, length, width)

    def refill() -> None:
        ids.random_(rows)
        normal(weight, positions)()

    function = Function(
        [weight, positions], refill, (*ids.shape, width),
        lambda w, p: kernels.embedding_reference(ids, w, p),
        {"minitriton library": lambda: lambda w, p: kernels.embedding(ids, w, p)},
        plain=lambda w, p: kernels.embedding_reference(ids, w, p),
    )  # fmt: skip
    n = 2.0 * tokens * width
    # rows of the table that are read: with many tokens most, some more than once
    moved = (n + 0.5 * min(n, 2.0 * rows * width), n + 2.0 * rows * width)
    return function.case(moved, (tokens * width, tokens * width), backward=backward)


def muon(setting: Setting, matrices: int, rows: int, columns: int) -> Case:
    """Newton-Schulz; the operations are those of two products with the wide matrices, as an
    iteration on their Gram matrices alone would need."""
    x = empty(setting, matrices, rows, columns)
    plain = kernels.newton_schulz_reference
    contenders: dict[str, Any] = {
        "minitriton library": one(lambda: kernels.newton_schulz(x)),
        "torch": one(lambda: plain(x)),
        "torch.compile": cases.compiled(plain, x),
    }

    def reference() -> list[torch.Tensor]:
        return [plain(x.double()).float()]

    work = Work(4.0 * x.numel(), 4.0 * matrices * rows * rows * columns, "bf16")
    # torch iterates in bf16, as Muon's users do: its error is 2.4e-2, ours 2e-3 and bf16's rounding
    return Case(work, normal(x), reference, contenders, bound=4e-2)


def cross_entropy_step(setting: Setting, rows: int, columns: int) -> Case:
    """Loss and gradient of the logits in one call, as a training step takes them."""
    logits = empty(setting, rows, columns)
    targets = torch.zeros(rows, device=setting.device, dtype=torch.int64)

    def refill() -> None:
        normal(logits, scale=2.0)()
        targets.random_(columns)

    def step(loss_of: Body, x: torch.Tensor) -> list[torch.Tensor]:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            loss = loss_of(leaf, targets)
        return [loss, *torch.autograd.grad(loss, leaf)]

    def liger() -> list[Trial]:
        liger_cross_entropy = cases.liger("liger_cross_entropy")

        own = torch.empty_like(logits)  # it writes the gradient over the logits
        call = lambda: step(liger_cross_entropy, own)  # noqa: E731
        return [Trial("", call, restore=lambda: own.copy_(logits))]

    def compiled() -> list[Trial]:
        fast = torch.compile(F.cross_entropy, dynamic=False)
        return [Trial("default mode", lambda: step(fast, logits))]

    def reference() -> list[torch.Tensor]:
        with exact_fp32():
            return step(F.cross_entropy, logits.float())

    contenders: dict[str, Any] = {
        "minitriton library": one(lambda: step(kernels.cross_entropy, logits)),
        "torch": one(lambda: step(F.cross_entropy, logits)),
        "torch.compile": compiled, "liger": liger,
    }  # fmt: skip
    n = logits.numel()
    return Case(Work(4 * n, 8 * n), refill, reference, contenders)
