"""Mixture of experts: the router with its sorting, experts in bf16 and with MXFP4 weights."""

from __future__ import annotations

import functools

import torch

from minitriton import kernels
from minitriton.bench.cases import Case, LeftOut, Setting, exact_fp32, normal, one
from minitriton.bench.functions import Body, Function, empty
from minitriton.bench.roofline import Work

CHOSEN = 16


def router(setting: Setting, tokens: int, experts: int, chosen: int = CHOSEN) -> Case:
    """Scores, the choice, its weights, and rows sorted by expert. What is compared are the sorted
    weights: neighbours that rounding swaps are no error."""
    logits = empty(setting, tokens, experts, dtype=torch.float32)
    bias = empty(setting, experts, dtype=torch.float32)

    def plain(logits: torch.Tensor, bias: torch.Tensor) -> list[torch.Tensor]:
        scores = torch.sigmoid(logits)
        best = (scores + bias).topk(chosen + 1, -1).indices[:, :chosen]
        weights = scores.gather(-1, best)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        flat = best.flatten()
        return [weights, torch.bincount(flat, minlength=experts), *torch.sort(flat, stable=True)]

    def ours() -> torch.Tensor:
        return kernels.moe_route(logits, bias, chosen, tile_rows=64).weights

    contenders = {"minitriton library": one(ours), "torch": one(lambda: plain(logits, bias))}
    n = logits.numel()
    return Case(
        Work(4.0 * n, 8.0 * n), normal(logits, bias),
        lambda: [plain(logits, bias)[0].sort(-1).values], contenders, bound=1e-5,
        view=lambda results: [results[0].sort(-1).values],
    )  # fmt: skip


class Experts:
    """Tokens z [tokens, latent], each with `chosen` of the experts by a routing that `refill` makes
    anew, and the formula in plain torch."""

    def __init__(
        self, setting: Setting, tokens: int, experts: int, latent: int, chosen: int, mxfp4: bool
    ) -> None:
        self.setting, self.chosen, self.experts = setting, chosen, experts
        self.z = empty(setting, tokens, latent)
        self.logits = torch.zeros(tokens, experts, device=setting.device)
        self.tile_rows = kernels.expert_tile_rows(tokens, chosen, experts, mxfp4=mxfp4)
        self.refill()

    def refill(self) -> None:
        normal(self.z, self.logits)()
        self.routing = kernels.moe_route(self.logits, None, self.chosen, tile_rows=self.tile_rows)

    def work(self, width: int, bits: float, rate: str) -> Work:
        """Of weights with so many bits; one token reads those of its own experts only."""
        tokens, latent = self.z.shape
        read = self.chosen if tokens == 1 else self.experts
        moved = 3.0 * read * latent * width * bits / 8 + 4.0 * self.z.numel()
        return Work(moved, 6.0 * tokens * self.chosen * latent * width, rate)

    def exact(self, z: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        return kernels.moe_experts_reference(z, w13, w2, self.routing)

    def ours(self, z: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        return kernels.moe_experts(z, w13, w2, self.routing)

    def grouped(self) -> Body:
        """Sorted rows through torch's grouped product."""
        if self.setting.device == "cpu":
            raise LeftOut("torch has no grouped product on the CPU")

        def call(z: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
            order = self.routing.experts.flatten().sort(stable=True).indices
            ends = self.routing.counts.cumsum(0, dtype=torch.int32)
            x = torch._grouped_mm(z[order // self.chosen], w13.mT, offs=ends)
            inner = kernels.situ_glu_reference(*x.chunk(2, -1))
            y = torch._grouped_mm(inner, w2.mT, offs=ends)
            weighted = y * self.routing.weights.flatten()[order, None].to(y.dtype)
            return torch.zeros_like(z).index_add_(0, order // self.chosen, weighted)

        return call


def moe(
    setting: Setting, tokens: int, experts: int, latent: int, width: int, chosen: int = CHOSEN,
    backward: bool = False,
) -> Case:  # fmt: skip
    """An eighth of K3's experts: every token's slots all lie here."""
    own = Experts(setting, tokens, experts, latent, chosen, mxfp4=False)
    w13, w2 = empty(setting, experts, 2 * width, latent), empty(setting, experts, latent, width)

    def refill() -> None:
        own.refill()
        normal(w13, scale=latent**-0.5)()
        normal(w2, scale=width**-0.5)()

    function = Function(
        [own.z, w13, w2], refill, tuple(own.z.shape), own.exact,
        {"minitriton library": lambda: own.ours, "torch": own.grouped},
    )  # fmt: skip
    work = own.work(width, 16, "bf16")
    return function.case(
        (work.bytes, 2 * work.bytes), (work.flop, 2 * work.flop), "bf16", backward=backward,
        bounds=(2e-2, 3e-2),
    )  # fmt: skip


def moe_mxfp4(setting: Setting, **sizes: int) -> Case:
    """Weights of 4.25 bits, activations in bf16; `moe` of the same size has both in bf16."""
    return _mxfp4(setting, "bf16", **sizes)


def moe_w4a8(setting: Setting, **sizes: int) -> Case:
    """The same with activations in fp8."""
    return _mxfp4(setting, "fp8", **sizes)


def _mxfp4(
    setting: Setting, activations: str, tokens: int, experts: int, latent: int, width: int,
    chosen: int = CHOSEN,
) -> Case:  # fmt: skip
    own = Experts(setting, tokens, experts, latent, chosen, mxfp4=True)
    byte = functools.partial(empty, setting, experts, dtype=torch.uint8)
    w13, scales13 = byte(2 * width, latent // 2), byte(2 * width, latent // 32)
    w2, scales2 = byte(latent, width // 2), byte(latent, width // 32)

    def refill() -> None:
        own.refill()
        for codes, scales, depth in ((w13, scales13, latent), (w2, scales2, width)):
            codes.random_(0, 256)
            middle = 126 - depth.bit_length() // 2  # products keep the scale of their inputs
            scales.random_(middle - 1, middle + 1)

    def reference() -> list[torch.Tensor]:
        with exact_fp32():
            wide = [kernels.mxfp4_dequantize(w, s, torch.float32)
                    for w, s in ((w13, scales13), (w2, scales2))]  # fmt: skip
            return [own.exact(own.z.float(), *wide)]

    def ours() -> torch.Tensor:
        return kernels.moe_experts_mxfp4(
            own.z, w13, scales13, w2, scales2, own.routing, activations=activations
        )

    work = own.work(width, 4.25, "fp8" if activations == "fp8" else "bf16")
    bound = 6e-2 if activations == "fp8" else 2e-2  # activations in fp8 are rounded by 2.6e-2
    return Case(work, refill, reference, {"minitriton library": one(ours)}, bound)
