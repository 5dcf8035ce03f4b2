"""Short causal convolution over time, depthwise, with SiLU and an L2 norm per head fused.

    conv_t = bias + sum_k weight[:, W - 1 - k] x_{t-k}        k = 0 .. W - 1
    y_t    = silu(conv_t)                                     (activation="silu")
    y_t   /= sqrt(sum_head y_t^2 + 1e-6)                      (norm_heads = channels per head)

Source: the KDA layer of Kimi K3 (technical report, section 2.1: W = 4, no bias; q and k with the
norm, v without) and of Kimi Linear (arXiv 2510.26692). Inputs before a sequence's first token are
those of its initial state, or zeros. A *state* is [N, W - 1, D]: the last W - 1 inputs, the oldest
first. One launch forward; one backward, and a small one where states take part. fp32 inside.
Gradients of weight and bias are summed per program and then over programs, always in one order.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch

import minitriton as triton
from minitriton.kernels import checks
from minitriton.kernels import short_conv_kernels as kernels
from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.operator import operator
from minitriton.kernels.packing import bounds_on, count_sequences
from minitriton.kernels.rows import dense, new_like

WIDTHS = (2, 3, 4)
SPAN = 128  # channels of a program where no norm asks for whole heads
WIDEST_HEAD = 1024
TILE = 512  # elements that a program steps through at once: four per thread
AHEAD = 4  # tokens whose inputs are read before the first of them is computed; backward: half
ENOUGH = 2048  # programs that fill any GPU several times
SEGMENTS = (256, 128, 64, 32, 16)  # tokens of a segment: the longest that leaves enough programs


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Literal["silu"] | None = "silu",
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    norm_heads: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(y, final state or None); differentiable in x, weight, bias and initial_state.

    x: [B, T, D] in fp32, bf16 or fp16; views whose channels are adjacent are read in place. weight:
    [D, W] with W = 2, 3 or 4, the tap of the token itself last; bias: [D] or None; both fp32 or in
    x's dtype. initial_state: [N, W - 1, D], the last inputs before the first token, the oldest
    first, fp32 or in x's dtype, in any strides (for [N, D, W - 1] pass `.transpose(1, 2)`); None is
    zeros. cu_seqlens: int32 or int64 [N + 1], bounds of N sequences packed along T, with B = 1;
    they may be shorter than W - 1 or empty. Else N = B. Bounds on the CPU are checked, those on a
    GPU are not read by the host and must rise from 0 to T. norm_heads: channels of a head, which
    must divide D, at most 1024: y of every head is scaled to length 1. y: [B, T, D] in x's dtype,
    contiguous. The final state is contiguous, [N, W - 1, D] in the initial state's dtype or x's:
    it continues the sequence when passed as the next initial state. KernelArgumentError names the
    argument that does not fit.
    """
    check_inputs(x, weight, bias, norm_heads, rank=3)
    sequences = count_sequences(cu_seqlens, x, "x")
    if initial_state is not None:
        check_state("initial_state", initial_state, x, weight, sequences)
    out, final = _conv_op(
        x, weight, bias, initial_state, cu_seqlens, is_silu(activation), norm_heads or 0,
        bool(output_final_state),
    )  # fmt: skip
    return out, final if output_final_state else None


def short_conv_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Literal["silu"] | None = "silu",
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    norm_heads: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`short_conv` in plain torch, in the dtype of its arguments."""
    if cu_seqlens is not None:
        parts = [
            short_conv_reference(
                x[:, start:end], weight, bias, activation,
                None if initial_state is None else initial_state[n : n + 1], True, None, norm_heads,
            )
            for n, (start, end) in enumerate(pairwise(cu_seqlens.tolist()))
        ]  # fmt: skip
        states = torch.cat([s for _, s in parts if s is not None])
        return torch.cat([y for y, _ in parts], 1), states if output_final_state else None
    back = weight.shape[1] - 1
    if initial_state is None:
        initial_state = x.new_zeros(x.shape[0], back, x.shape[2])
    inputs = torch.cat([initial_state, x], 1)
    y = sum(inputs[:, k : k + x.shape[1]] * weight[:, k] for k in range(back + 1))
    y = y if bias is None else y + bias
    y = torch.nn.functional.silu(y) if activation == "silu" else y
    if norm_heads:
        heads = y.unflatten(-1, (-1, norm_heads))
        y = (heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + 1e-6)).flatten(-2)
    return y, inputs[:, x.shape[1] :] if output_final_state else None


def is_silu(activation: object) -> bool:
    """Whether there is an activation; refuses what is neither "silu" nor None."""
    if activation not in ("silu", None):
        raise KernelArgumentError(
            f"argument 'activation': must be 'silu' or None, got {activation!r}"
        )
    return activation == "silu"


def check_inputs(x: object, weight: object, bias: object, norm_heads: object, rank: int) -> None:
    """Refuses inputs that do not fit each other; x: [..., D] of the given rank."""
    shape = checks.float_tensor("x", x).shape
    if len(shape) != rank or shape[-1] == 0:
        wanted = "[B, T, D]" if rank == 3 else "[B, D] or [B, q, D]"
        raise KernelArgumentError(
            f"argument 'x': shape {tuple(shape)}; it must be {wanted} with D >= 1"
        )
    taps = checks.float_tensor("weight", weight)
    if taps.dim() != 2 or taps.shape[0] != shape[-1] or taps.shape[1] not in WIDTHS:
        raise KernelArgumentError(
            f"argument 'weight': shape {tuple(taps.shape)}; it must be ({shape[-1]}, W), the "
            "channels of 'x' and a width W of 2, 3 or 4"
        )
    _agree("weight", taps, x)
    if bias is not None:
        checks.row_vector("bias", bias, "x", x)
    if norm_heads is not None and (
        isinstance(norm_heads, bool)
        or not isinstance(norm_heads, int)
        or not 0 < norm_heads <= WIDEST_HEAD
        or shape[-1] % norm_heads != 0
    ):
        raise KernelArgumentError(
            f"argument 'norm_heads': must be a number of channels from 1 to {WIDEST_HEAD} that "
            f"divides the {shape[-1]} of 'x', got {norm_heads!r}"
        )


def check_state(
    name: str, state: object, x: torch.Tensor, weight: torch.Tensor, sequences: int | None
) -> None:
    """Refuses a state that is not [sequences, W - 1, D]; `sequences` None: any number."""
    tensor = checks.float_tensor(name, state)
    wanted = (weight.shape[1] - 1, x.shape[-1])
    if tensor.dim() != 3 or tensor.shape[1:] != wanted or sequences not in (None, tensor.shape[0]):
        first = "any" if sequences is None else sequences
        raise KernelArgumentError(
            f"argument '{name}': shape {tuple(tensor.shape)}; it must be ({first}, {wanted[0]}, "
            f"{wanted[1]}): sequences, W - 1 inputs, channels"
        )
    _agree(name, tensor, x)


def _agree(name: str, tensor: torch.Tensor, x: torch.Tensor) -> None:
    if tensor.dtype not in (torch.float32, x.dtype):
        raise KernelArgumentError(
            f"argument '{name}': dtype {tensor.dtype}; it must be torch.float32 or that of 'x', "
            f"{x.dtype}"
        )
    if tensor.device != x.device:
        raise KernelArgumentError(
            f"argument '{name}': device {tensor.device} differs from that of 'x', {x.device}"
        )


def tile_of(columns: int, norm: int) -> tuple[dict[str, int], int]:
    """(constants of a kernel's tile and its warps, programs across the channels)."""
    span = norm or min(SPAN, max(16, triton.next_power_of_2(columns)))
    block = max(16, triton.next_power_of_2(span))
    elements = TILE if columns % 16 == 0 else TILE // 2  # odd rows: an address per element
    tile = {"ROWS": max(1, elements // block), "SPAN": span, "BLOCK": block}
    return {**tile, "num_warps": max(4, block // 128)}, triton.cdiv(columns, span)


class _Packing(NamedTuple):
    bounds: torch.Tensor | None  # on the device
    where: torch.Tensor | None  # int32 [2, tokens]


def _pack(cu_seqlens: torch.Tensor | None, x: torch.Tensor) -> _Packing:
    if cu_seqlens is None:
        return _Packing(None, None)
    tokens = x.shape[1]
    bounds = bounds_on(x.device, cu_seqlens, tokens)
    where = torch.empty(2, tokens, dtype=torch.int32, device=x.device)
    if tokens > 0:
        sequences = bounds.shape[0] - 1
        kernels.where_kernel[(triton.cdiv(tokens, 256),)](
            bounds, where, tokens, sequences, sequences.bit_length(), BLOCK=256, num_warps=4
        )
    return _Packing(bounds, where)


@dataclass(frozen=True)
class _Call:
    """Arguments that the kernels of one call share."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    state: torch.Tensor | None
    packing: _Packing
    silu: bool
    norm: int

    @property
    def sequences(self) -> int:
        return len(self.x) if self.packing.bounds is None else len(self.packing.bounds) - 1

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Pointers of x, weight, bias and state; x stands for what is absent."""
        bias = self.x if self.bias is None else self.bias.contiguous()
        return self.x, self.weight.contiguous(), bias, self.x if self.state is None else self.state

    def strides(self) -> tuple[int, ...]:
        state = (0, 0, 1) if self.state is None else self.state.stride()
        return self.x.stride(0), self.x.stride(1), *state

    def flags(self) -> dict[str, Any]:
        return {
            "WIDTH": self.weight.shape[1], "BIAS": self.bias is not None,
            "STATE": self.state is not None, "PACKED": self.packing.bounds is not None,
            "SILU": self.silu, "NORM": self.norm > 0,
        }  # fmt: skip

    def segments(self) -> tuple[int, int, dict[str, int]]:
        """(tokens of a segment, programs along time, tile) of the kernels that walk all tokens."""
        batches, tokens, columns = self.x.shape
        tile, across = tile_of(columns, self.norm)
        for length in SEGMENTS:
            along = triton.cdiv(batches * triton.cdiv(tokens, length), tile["ROWS"])
            if along * across >= ENOUGH:
                break
        return min(length, max(AHEAD, triton.next_power_of_2(tokens))), along, tile


def _forward(call: _Call, output_final: bool) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight, bias, state = call.inputs()
    out, final = _empty_outputs(x, weight, call.state, call.sequences, output_final)
    batches, tokens, columns = x.shape
    if out.numel() > 0:
        length, along, tile = call.segments()
        across = triton.cdiv(columns, tile["SPAN"])
        where = x if call.packing.where is None else call.packing.where
        kernels.forward_kernel[(across * along,)](
            x, weight, bias, state, where, out, *call.strides(), batches, tokens, columns, length,
            **call.flags(), **tile, AHEAD=AHEAD,
        )  # fmt: skip
    if output_final and final.numel() > 0:
        tile, across = tile_of(columns, call.norm)
        flags = {name: call.flags()[name] for name in ("WIDTH", "STATE", "PACKED")}
        kernels.final_state_kernel[(across * triton.cdiv(call.sequences, tile["ROWS"]),)](
            x, state, x if call.packing.bounds is None else call.packing.bounds, final,
            *call.strides(), call.sequences, tokens, columns, **flags, **tile,
        )  # fmt: skip
    return out, final


def _backward(
    call: _Call, grad: torch.Tensor | None, dfinal: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    x, weight, bias, state = call.inputs()
    dx, dweight, dbias, dstate = _empty_gradients(x, call.weight, call.bias, call.state)
    dy = dense(torch.zeros_like(x) if grad is None else grad)
    batches, tokens, columns = x.shape
    if dx.numel() > 0:
        length, along, tile = call.segments()
        across = triton.cdiv(columns, tile["SPAN"])
        width = weight.shape[1]
        packed_state = call.packing.bounds is not None and call.state is not None  # registers
        partial = torch.empty(along, width + 1, columns, dtype=torch.float32, device=x.device)
        kernels.backward_kernel[(across * along,)](
            dy, x, weight, bias, state, x if call.packing.where is None else call.packing.where,
            dx, partial, dy.stride(0), dy.stride(1), *call.strides(), batches, tokens, columns,
            length, **call.flags(), **tile, AHEAD=1 if packed_state else AHEAD // 2,
        )  # fmt: skip
        kernels.sums_kernel[(triton.cdiv(columns, 64), width + (call.bias is not None))](
            partial, dweight, dbias, along, columns, WIDTH=width, DEPTH=32, BLOCK=64
        )
    else:
        dweight.zero_()
        dbias.zero_()
    if (call.state is not None or dfinal is not None) and call.sequences > 0:
        tile, across = tile_of(columns, call.norm)
        kernels.state_backward_kernel[(across * triton.cdiv(call.sequences, tile["ROWS"]),)](
            dy, x if dfinal is None else dfinal.contiguous(), x, weight, bias, state,
            x if call.packing.bounds is None else call.packing.bounds, dx, dstate, dy.stride(0),
            dy.stride(1), *call.strides(), call.sequences, tokens, columns,
            FINAL=dfinal is not None, **call.flags(), **tile,
        )  # fmt: skip
    return dx, dweight, dbias, dstate


def _empty_outputs(
    x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor | None, sequences: int, final: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = x.dtype if state is None else state.dtype
    shape = (sequences, weight.shape[1] - 1, x.shape[2]) if final else (0,)
    return new_like(x), torch.empty(shape, dtype=dtype, device=x.device)


def _empty_gradients(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Room for the gradients; an empty tensor stands for that of an absent argument."""

    def room(like: torch.Tensor | None) -> torch.Tensor:
        return x.new_empty(0) if like is None else new_like(like)

    return room(x), room(weight), room(bias), room(state)


@operator("short_conv")
def _conv_op(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None, silu: bool, norm: int,
    final: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    packing = _pack(cu_seqlens, x)
    return _forward(_Call(dense(x), weight, bias, initial_state, packing, silu, norm), final)


@operator("short_conv_backward")
def _conv_backward_op(
    grad: torch.Tensor | None, dfinal: torch.Tensor | None, x: torch.Tensor, weight: torch.Tensor,
    bias: torch.Tensor | None, initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None, silu: bool, norm: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    packing = _pack(cu_seqlens, x)
    return _backward(
        _Call(dense(x), weight, bias, initial_state, packing, silu, norm), grad, dfinal
    )


@_conv_op.register_fake
def _(x, weight, bias, initial_state, cu_seqlens, silu, norm, final):
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return _empty_outputs(x, weight, initial_state, sequences, final)


_conv_backward_op.register_fake(
    lambda grad, dfinal, x, weight, bias, initial_state, cu_seqlens, silu, norm: _empty_gradients(
        x, weight, bias, initial_state
    )
)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.silu, ctx.norm, ctx.final = inputs[5:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: torch.Tensor | None, dfinal: torch.Tensor | None) -> Any:
    if grad is None and dfinal is None:
        return (None,) * 8
    dx, dweight, dbias, dstate = _conv_backward_op(
        grad, dfinal if ctx.final else None, *ctx.saved_tensors, ctx.silu, ctx.norm
    )
    _, _, bias, state, _ = ctx.saved_tensors
    return (
        dx, dweight, None if bias is None else dbias, None if state is None else dstate,
        None, None, None, None,
    )  # fmt: skip


_conv_op.register_autograd(_differentiate, setup_context=_save)
