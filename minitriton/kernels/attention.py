"""Flash attention, forward and backward: the operator under `attention` and `mla_attention`.

    out = dropout(softmax(scale q k^T)) v        lse = log sum exp(scale q k^T)

Scores never reach memory. Products run on tensor cores with fp32 sums; the softmax is fp32. Source:
Dao, FlashAttention-2, arXiv 2307.08691.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from minitriton.kernels import attention_backward, attention_forward, checks
from minitriton.kernels.attention_tiles import (
    PRECISIONS,
    Operands,
    Plan,
    aligned,
    attention_dropout_mask,
    channel_tiles,
)
from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.operator import operator
from minitriton.kernels.packing import bounds_on, count_sequences
from minitriton.kernels.rows import new_like

WIDEST = 256


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    return_lse: bool = False,
    precision: str = "tf32x3",
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q k^T) v per head; differentiable in q, k and v, also through lse.

    q: [B, Tq, H, D], k: [B, Tk, Hk, D], v: [B, Tk, Hk, Dv], one dtype (fp32, bf16 or fp16), D and
    Dv in 1..256; Hk divides H, and H / Hk neighbouring heads of q share one of k and v (GQA). Views
    of dense rows in whole groups of 16 bytes are read in place, others are copied. causal: query i
    sees keys up to i + Tk - Tq (the last query sees all); a query that sees none gives zeros and
    lse = -inf. scale: positive, default 1 / sqrt(D). The result is [B, Tq, H, Dv], contiguous, in
    the dtype of q or in `out_dtype`; with return_lse also lse [B, H, Tq] in fp32, natural
    logarithm.

    dropout: probability in [0, 1) that an entry of softmax counts as zero; the others grow by
    1 / (1 - dropout). It needs seed: an int, or an int64 tensor of one element on the device of q,
    which CUDA graphs can change between replays. `attention_dropout_mask` tells what is kept.

    cu_seqlens: int32 or int64 [N + 1], with B = 1 and Tq = Tk: sequence i is the tokens
    cu_seqlens[i] .. cu_seqlens[i + 1], some may be empty. On the CPU it is checked: from 0 to T,
    not decreasing. On a GPU nobody looks at the values (no synchronisation); they must be so.

    precision: of fp32 products: "tf32x3" (relative error about 1e-6), "tf32" (1e-3, faster) or
    "ieee" (slow). Results do not vary from run to run. KernelArgumentError names the argument that
    does not fit.
    """
    _check_qkv(q, k, v)
    if cu_seqlens is not None and k.shape[1] != q.shape[1]:
        raise KernelArgumentError(
            f"argument 'k': {k.shape[1]} tokens; with 'cu_seqlens' it needs those of 'q', "
            f"{q.shape[1]}"
        )
    settings = check_settings(q, scale, dropout, seed, cu_seqlens, precision, out_dtype)
    out, lse = attend(q, k, None, v, None, causal=check_bool("causal", causal), **settings)
    return (out, lse) if check_bool("return_lse", return_lse) else out


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of `attention` in plain torch, in the dtype of its arguments."""
    width = q.shape[3] ** -0.5 if scale is None else scale
    if k.shape[2] != q.shape[2]:
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    if cu_seqlens is None:
        mask = None
        if dropout:
            shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
            mask = attention_dropout_mask(seed, shape, dropout).to(q.device) / (1 - dropout)
        return _reference(q, k, v, causal, width, mask)
    ends = cu_seqlens.tolist()
    outs, lses = [], []
    for i, (low, high) in enumerate(itertools.pairwise(ends)):
        part = slice(low, high)
        mask = None
        if dropout:
            shape = (len(ends) - 1, q.shape[2], high - low, high - low)
            kept = attention_dropout_mask(seed, shape, dropout)[i : i + 1]
            mask = kept.to(q.device) / (1 - dropout)
        out, lse = _reference(q[:, part], k[:, part], v[:, part], causal, width, mask)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, 1), torch.cat(lses, 2)


def _reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    row = torch.arange(q.shape[1], device=q.device)[:, None] + k.shape[1] - q.shape[1]
    seen = (torch.arange(k.shape[1], device=q.device) <= row) | (not causal)
    blind = ~seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~(seen | blind), -float("inf"))
    p = torch.softmax(scores, -1) * ~blind
    lse = torch.logsumexp(scores, -1).masked_fill(blind[:, 0], -float("inf"))
    return torch.einsum("bhqk,bkhd->bqhd", p if mask is None else p * mask, v), lse


def attend(
    q: torch.Tensor, k: torch.Tensor, rest: torch.Tensor | None, v: torch.Tensor,
    gate: torch.Tensor | None, *, causal: bool, cu_seqlens: torch.Tensor | None,
    seed: torch.Tensor | None, scale: float, dropout: float, precision: str,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out, lse) of checked arguments; rest [B, T, R]: channels of k that all heads share."""
    return _attend_op(
        q, k, rest, v, gate, cu_seqlens, seed, causal, scale, dropout, precision, out_dtype
    )


def check_settings(
    q: torch.Tensor, scale: object, dropout: object, seed: object, cu_seqlens: object,
    precision: object, out_dtype: object,
) -> dict[str, Any]:  # fmt: skip
    """The arguments that do not depend on the kind of attention, as `attend` takes them."""
    dropout = checks.fraction("dropout", dropout)
    if precision not in PRECISIONS:
        raise KernelArgumentError(
            f"argument 'precision': {precision!r}; it is one of {', '.join(PRECISIONS)}"
        )
    if out_dtype not in (None, *checks.FLOATS):
        raise KernelArgumentError(
            f"argument 'out_dtype': {out_dtype!r}; it must be torch.float32, bfloat16 or float16"
        )
    count_sequences(cu_seqlens, q)
    if isinstance(cu_seqlens, torch.Tensor):
        cu_seqlens = bounds_on(q.device, cu_seqlens, q.shape[1]).to(torch.int32)
    return {
        "cu_seqlens": cu_seqlens,
        "seed": _check_seed(seed, dropout, q.device),
        "scale": q.shape[3] ** -0.5 if scale is None else checks.positive("scale", scale),
        "dropout": dropout,
        "precision": precision,
        "out_dtype": q.dtype if out_dtype is None else out_dtype,
    }


def check_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise KernelArgumentError(f"argument '{name}': must be True or False, got {value!r}")
    return value


def check_shape(
    name: str, value: object, wanted: tuple[int | None, ...], q: torch.Tensor, exact: bool = True
) -> torch.Tensor:
    """`value` if it is on q's device, in its dtype if `exact`, and of a shape (None: any size)."""
    tensor = checks.float_tensor(name, value)
    fits = len(wanted) == tensor.dim()
    for size, found in zip(wanted, tensor.shape, strict=False):
        fits = fits and size in (None, found)
    if not fits:
        shown = ", ".join("any" if n is None else str(n) for n in wanted)
        raise KernelArgumentError(
            f"argument '{name}': shape {tuple(tensor.shape)}; 'q' of shape {tuple(q.shape)} needs "
            f"({shown})"
        )
    if exact:
        return checks.alike(name, tensor, "q", q)
    if tensor.device != q.device:
        raise KernelArgumentError(
            f"argument '{name}': device {tensor.device} differs from that of 'q', {q.device}"
        )
    return tensor


def check_width(name: str, width: int) -> None:
    if not 1 <= width <= WIDEST:
        raise KernelArgumentError(
            f"argument '{name}': {width} channels per head; 1 to {WIDEST} are supported"
        )


def check_q(q: object) -> torch.Tensor:
    tensor = checks.float_tensor("q", q)
    if tensor.dim() != 4:
        raise KernelArgumentError(
            f"argument 'q': shape {tuple(tensor.shape)}; it must be [B, T, H, D]"
        )
    check_width("q", tensor.shape[3])
    return tensor


def _check_qkv(q: object, k: object, v: object) -> None:
    query = check_q(q)
    batch, _, heads, width = query.shape
    key = check_shape("k", k, (batch, None, None, width), query)
    if key.shape[2] != heads and (key.shape[2] == 0 or heads % key.shape[2]):
        raise KernelArgumentError(
            f"argument 'k': {key.shape[2]} heads do not divide the {heads} of 'q'"
        )
    value = check_shape("v", v, (batch, key.shape[1], key.shape[2], None), query)
    check_width("v", value.shape[3])


def _check_seed(seed: object, dropout: float, device: torch.device) -> torch.Tensor | None:
    if dropout == 0:
        return None
    if isinstance(seed, torch.Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != device:
            raise KernelArgumentError(
                f"argument 'seed': {seed.dtype} of {seed.numel()} elements on {seed.device}; a "
                f"tensor must hold one int64 on {device}"
            )
        return seed.reshape(1)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise KernelArgumentError(
            f"argument 'seed': {seed!r}; dropout needs an int in 0 .. 2^63 - 1 or an int64 tensor"
        )
    return torch.full((1,), seed, dtype=torch.int64, device=device)


@operator("attention")
def _attend_op(
    q: torch.Tensor, k: torch.Tensor, rest: torch.Tensor | None, v: torch.Tensor,
    gate: torch.Tensor | None, cu_seqlens: torch.Tensor | None, seed: torch.Tensor | None,
    causal: bool, scale: float, dropout: float, precision: str, out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    out, lse = _empty_outputs(q, v, out_dtype)
    if k.shape[1] == 0 or out.numel() == 0:
        return out.zero_(), lse.fill_(-float("inf"))
    call, plan = _call(q, k, rest, v, gate, cu_seqlens, seed, causal, scale, dropout, precision)
    attention_forward.forward(call, plan, out, lse)
    return out, lse


@operator("attention_backward")
def _attend_backward_op(
    grad: torch.Tensor, dlse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor,
    q: torch.Tensor, k: torch.Tensor, rest: torch.Tensor | None, v: torch.Tensor,
    gate: torch.Tensor | None, cu_seqlens: torch.Tensor | None, seed: torch.Tensor | None,
    causal: bool, scale: float, dropout: float, precision: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    dq, dk, drest, dv, dgate = gradients = _empty_gradients(q, k, rest, v, gate)
    if k.shape[1] == 0 or out.numel() == 0:
        for gradient in gradients:
            gradient.zero_()
        return gradients
    call, plan = _call(q, k, rest, v, gate, cu_seqlens, seed, causal, scale, dropout, precision)
    dlse = None if dlse is None else dlse.contiguous()
    prepared = attention_backward.prepare(call, plan, out, lse, grad, dlse, dgate)
    attention_backward.backward(call, plan, *prepared, dq, dk, drest, dv)
    return gradients


def _call(
    q: torch.Tensor, k: torch.Tensor, rest: torch.Tensor | None, v: torch.Tensor,
    gate: torch.Tensor | None, cu_seqlens: torch.Tensor | None, seed: torch.Tensor | None,
    causal: bool, scale: float, dropout: float, precision: str,
) -> tuple[Operands, Plan]:  # fmt: skip
    keys = aligned(k)
    if rest is None:
        head = channel_tiles(q.shape[3], v.shape[3], q.element_size())["HEAD"]
        others = keys[..., head:] if head < k.shape[3] else keys
    else:
        others = aligned(rest)[:, :, None].expand(-1, -1, k.shape[2], -1)
    call = Operands(
        aligned(q), keys, others, aligned(v), None if gate is None else aligned(gate), cu_seqlens,
        seed, scale, dropout,
    )  # fmt: skip
    return call, call.plan(causal, rest is not None, precision)


def _empty_outputs(
    q: torch.Tensor, v: torch.Tensor, out_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, queries, heads, _ = q.shape
    out = torch.empty(batch, queries, heads, v.shape[3], dtype=out_dtype, device=q.device)
    return out, torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)


def _empty_gradients(
    q: torch.Tensor, k: torch.Tensor, rest: torch.Tensor | None, v: torch.Tensor,
    gate: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Room for the gradients; an empty tensor stands for that of an absent argument."""

    def room(x: torch.Tensor | None) -> torch.Tensor:
        return q.new_empty(0) if x is None else new_like(x)

    return room(q), room(k), room(rest), room(v), room(gate)


_attend_op.register_fake(
    lambda q, k, rest, v, gate, cu_seqlens, seed, causal, scale, dropout, precision, out_dtype: (
        _empty_outputs(q, v, out_dtype)
    )
)
_attend_backward_op.register_fake(
    lambda grad, dlse, out, lse, q, k, rest, v, gate, *_: _empty_gradients(q, k, rest, v, gate)
)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*output, *inputs[:7])
    ctx.numbers = inputs[7:11]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
    out, lse, q, k, rest, v, gate, *lists = ctx.saved_tensors
    if grad is None:
        grad = torch.zeros_like(out)
    gradients = _attend_backward_op(grad, dlse, out, lse, q, k, rest, v, gate, *lists, *ctx.numbers)
    dq, dk, drest, dv, dgate = gradients
    return (
        dq, dk, None if rest is None else drest, dv, None if gate is None else dgate, *[None] * 7
    )  # fmt: skip


_attend_op.register_autograd(_differentiate, setup_context=_save)
