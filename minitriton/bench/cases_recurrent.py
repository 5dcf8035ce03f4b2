"""Kimi Delta Attention: whole sequences in chunks, and one token at a time."""

from __future__ import annotations

from typing import Any

import torch

from minitriton import kernels
from minitriton.bench.cases import Case, Setting, Trial, exact_fp32, normal, one, peer
from minitriton.bench.functions import Body, Function, empty, slow_to_tune
from minitriton.bench.roofline import Work

FLOOR = -5.0  # of the gate's logarithm, Kimi K3's
CHUNK = 64


class Operands:
    """q, k, v and the gate's logits z, [batch, tokens, heads, width]; beta's logits; parameters."""

    def __init__(self, setting: Setting, batch: int, tokens: int, heads: int, width: int) -> None:
        shape = (batch, tokens, heads, width)
        self.q, self.k, self.v, self.z = (empty(setting, *shape) for _ in range(4))
        self.beta = empty(setting, *shape[:3])
        self.A_log = empty(setting, heads, dtype=torch.float32)
        self.bias = empty(setting, heads, width, dtype=torch.float32)
        self.inputs = [self.q, self.k, self.v, self.z, self.beta]

    def refill(self) -> None:
        normal(*self.inputs, self.bias)()
        normal(self.A_log, scale=0.2)()

    def ours(self) -> dict[str, Any]:
        return {"gate": "sigmoid", "gate_floor": FLOOR, "A_log": self.A_log, "dt_bias": self.bias,
                "qk_l2norm": True, "beta_sigmoid": True}  # fmt: skip

    def of_fla(self) -> dict[str, Any]:
        return {"A_log": self.A_log, "dt_bias": self.bias.flatten(), "lower_bound": FLOOR,
                "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True,
                "use_beta_sigmoid_in_kernel": True}  # fmt: skip


def chunked_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    chunk: int = CHUNK,
) -> torch.Tensor:  # fmt: skip
    """The delta rule of q, k, v [B, T, H, d], logarithms g of the decays and beta [B, T, H].

    For fp64: e^-G of a chunk's summed decays G must not overflow. Token by token, as the library's
    reference goes, autograd would hold a state for each token.
    """
    batch, tokens, heads, width = q.shape
    padded = -tokens % chunk
    q, k, v, g, beta = (_chunks(x, padded, chunk) for x in (q, k, v, g, beta[..., None]))
    G = g.cumsum(-2)  # [B, H, N, C, d]
    q, last = q * G.exp(), G[..., -1:, :]
    ahead, behind, to_end = k * G.exp(), k * (-G).exp(), k * (last - G).exp()
    pairs = (beta * (ahead @ behind.mT)).tril(-1) + torch.eye(chunk, dtype=q.dtype, device=q.device)
    solve = torch.linalg.solve_triangular
    own = solve(pairs, beta * v, upper=False, unitriangular=True)
    erased = solve(pairs, beta * ahead, upper=False, unitriangular=True)
    scores = (q @ behind.mT).tril()
    state = q.new_zeros(batch, heads, width, v.shape[-1])
    out = []
    for n in range(q.shape[2]):
        update = own[:, :, n] - erased[:, :, n] @ state
        out.append(q[:, :, n] @ state + scores[:, :, n] @ update)
        state = last[:, :, n].mT.exp() * state + to_end[:, :, n].mT @ update
    return torch.cat(out, 2)[:, :, :tokens].transpose(1, 2)


def _chunks(x: torch.Tensor, padded: int, chunk: int) -> torch.Tensor:
    """[B, T, H, d] as [B, H, N, C, d]; rows of zeros behind the last token change nothing."""
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padded)).transpose(1, 2)
    return x.unflatten(2, (-1, chunk))


def _exact(operands: Operands) -> Body:
    def exact(*inputs: torch.Tensor) -> torch.Tensor:
        q, k, v, z, beta = inputs
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        sharpness = operands.A_log.double().exp()[:, None]
        g = FLOOR * torch.sigmoid(sharpness * (z + operands.bias.double()))
        return chunked_reference(q * q.shape[-1] ** -0.5, k, v, g, torch.sigmoid(beta))

    return exact


def kda(setting: Setting, batch: int, tokens: int, heads: int, width: int,
        backward: bool = False) -> Case:  # fmt: skip
    operands = Operands(setting, batch, tokens, heads, width)

    def ours(*inputs: torch.Tensor) -> torch.Tensor:
        return kernels.chunk_kda(*inputs, **operands.ours())[0]

    def fla() -> Body:
        chunk_kda = peer("fla.ops.kda", "chunk_kda")

        return lambda *inputs: chunk_kda(*inputs, safe_gate=True, **operands.of_fla())[0]

    function = Function(
        operands.inputs, operands.refill, tuple(operands.v.shape), _exact(operands),
        {"minitriton library": lambda: ours, "fla": slow_to_tune(setting, fla)},
        wide=torch.float64,
    )  # fmt: skip
    n = batch * tokens * heads
    moved = (n * (10.0 * width + 2), n * (18.0 * width + 6))
    # products a token and head at chunks of 64; the backward pass makes the forward's pairs again
    flop = (n * 11.5 * width**2, n * 32.0 * width**2)
    return function.case(moved, flop, "bf16", backward=backward, bounds=(1e-2, 3e-2))


def kda_decode(setting: Setting, batch: int, heads: int, width: int) -> Case:
    """One token a sequence; the fp32 states are read and written."""
    operands = Operands(setting, batch, 1, heads, width)
    state = empty(setting, batch, heads, width, width, dtype=torch.float32)

    def refill() -> None:
        operands.refill()
        normal(state)()

    def library() -> list[Trial]:
        own = torch.empty_like(state)  # updated in place, as a cache is

        def call() -> list[torch.Tensor]:
            o, _ = kernels.recurrent_kda(*operands.inputs, state=own, **operands.ours())
            return [o, own]

        return [Trial("in place", call, restore=lambda: own.copy_(state))]

    def fla() -> list[Trial]:
        fused_recurrent_kda = peer("fla.ops.kda", "fused_recurrent_kda")

        options = operands.of_fla() | {"initial_state": state, "output_final_state": True}
        return one(lambda: fused_recurrent_kda(*operands.inputs, **options))()

    def plain(inputs: list[torch.Tensor]) -> Any:
        return kernels.recurrent_kda_reference(
            *inputs, initial_state=state, output_final_state=True, **operands.ours()
        )

    def reference() -> list[torch.Tensor]:
        with exact_fp32():
            return list(plain([x.float() for x in operands.inputs]))

    contenders = {"minitriton library": library, "fla": fla,
                  "torch": one(lambda: plain([x.float() for x in operands.inputs]))}  # fmt: skip
    n = state.numel()
    return Case(Work(8.0 * n, 7.0 * n), refill, reference, contenders, bound=8e-3)
