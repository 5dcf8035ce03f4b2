"""The short convolution while decoding: one token or a few per sequence, the state kept in place.

The formula is that of `short_conv`. One launch reads the last W - 1 inputs of each sequence from a
cache, walks the new tokens and writes the cache back; nothing else is touched.
"""

from __future__ import annotations

from typing import Literal

import torch

import minitriton as triton
from minitriton.kernels import checks
from minitriton.kernels import short_conv_kernels as kernels
from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.operator import operator
from minitriton.kernels.rows import dense, new_like
from minitriton.kernels.short_conv import (
    AHEAD,
    check_inputs,
    check_state,
    is_silu,
    short_conv_reference,
    tile_of,
)


def short_conv_step(
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Literal["silu"] | None = "silu",
    state_indices: torch.Tensor | None = None,
    norm_heads: int | None = None,
) -> torch.Tensor:
    """The result for the next tokens of each sequence; moves `state` on in place.

    x: [B, D], or [B, q, D] for q tokens each, fp32, bf16 or fp16; weight, bias, activation,
    norm_heads: as for `short_conv`. state: [S, W - 1, D], the last inputs, the oldest first, fp32
    or in x's dtype, in any strides (for [S, D, W - 1] pass `.transpose(1, 2)`). state_indices:
    int32 [B], the slot of each sequence, each slot at most once; -1 skips the sequence, whose
    result is zeros. Slots are not checked. Without it S = B. The result is contiguous, in x's shape
    and dtype. There is no gradient: inputs that require one are refused unless under
    `torch.no_grad()`. KernelArgumentError names the argument that does not fit.
    """
    tensor = checks.float_tensor("x", x)
    check_inputs(x, weight, bias, norm_heads, rank=2 if tensor.dim() == 2 else 3)
    check_state("state", state, x, weight, len(x) if state_indices is None else None)
    if state_indices is not None:
        check_slots(state_indices, x, len(x))
    checks.no_gradient(
        "use short_conv, or call it under torch.no_grad()",
        x=x, weight=weight, state=state, bias=bias,
    )  # fmt: skip
    silu = is_silu(activation)
    tokens = x.unsqueeze(1) if x.dim() == 2 else x
    out = _step_op(tokens, weight, state, bias, state_indices, silu, norm_heads or 0)
    return out.view(x.shape)


def short_conv_step_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Literal["silu"] | None = "silu",
    state_indices: torch.Tensor | None = None,
    norm_heads: int | None = None,
) -> torch.Tensor:
    """`short_conv_step` in plain torch, in the dtype of its arguments; also moves `state` on."""
    live = slots = torch.arange(len(x), device=x.device)
    if state_indices is not None:
        live = (state_indices >= 0).nonzero().flatten()
        slots = state_indices[live].long()
    tokens = x.unsqueeze(1) if x.dim() == 2 else x
    y, final = short_conv_reference(
        tokens[live], weight, bias, activation, state[slots], True, None, norm_heads
    )
    if final is not None:
        state[slots] = final.to(state.dtype)
    return torch.zeros_like(tokens).index_copy(0, live, y).view(x.shape)


def check_slots(state_indices: object, x: torch.Tensor, sequences: int) -> None:
    """Refuses slots of a state cache that are not int32 [sequences] beside x."""
    if (
        not isinstance(state_indices, torch.Tensor)
        or state_indices.dtype != torch.int32
        or state_indices.shape != (sequences,)
        or state_indices.device != x.device
    ):
        raise KernelArgumentError(
            f"argument 'state_indices': it must be an int32 tensor of shape ({sequences},) on "
            f"{x.device}: one slot per sequence, -1 to skip it"
        )


def step_tile_of(columns: int, norm: int, batches: int) -> tuple[dict[str, int], int]:
    """`tile_of` without rows, and the warps for them, that few sequences would leave idle."""
    tile, across = tile_of(columns, norm)
    rows = min(tile["ROWS"], triton.next_power_of_2(batches))
    warps = max(1, tile["num_warps"] * rows // tile["ROWS"])
    return {**tile, "ROWS": rows, "num_warps": warps}, across


@operator("short_conv_step", mutates_args=("state",))
def _step_op(
    x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, bias: torch.Tensor | None,
    state_indices: torch.Tensor | None, silu: bool, norm: int,
) -> torch.Tensor:  # fmt: skip
    out = new_like(x)
    if out.numel() == 0:
        return out
    tokens = dense(x)
    batches, q_len, columns = tokens.shape
    tile, across = step_tile_of(columns, norm, batches)
    kernels.step_kernel[(across * triton.cdiv(batches, tile["ROWS"]),)](
        tokens, weight.contiguous(), tokens if bias is None else bias.contiguous(), state,
        tokens if state_indices is None else state_indices.contiguous(), out, tokens.stride(0),
        tokens.stride(1), *state.stride(), batches, q_len, columns, WIDTH=weight.shape[1],
        BIAS=bias is not None, SLOTS=state_indices is not None, SILU=silu, NORM=norm > 0, **tile,
        AHEAD=min(AHEAD, triton.next_power_of_2(q_len)),
    )  # fmt: skip
    return out


@_step_op.register_fake
def _(x, weight, state, bias, state_indices, silu, norm):
    return new_like(x)
