"""Self-attention of queries, keys and values that lie side by side, as one matrix product writes
them; the gradient is one tensor of the same layout, of which each kernel writes its part.

    out = dropout(softmax(q k^T / sqrt(D))) v        [q | k | v] = qkv

The kernels are those of `attention`: autograd would otherwise have to put three gradients together
by itself.
"""

from __future__ import annotations

from typing import Any

import torch

from minitriton.kernels import attention_backward, attention_forward, checks
from minitriton.kernels.attention import (
    attention_reference,
    check_bool,
    check_settings,
    check_width,
)
from minitriton.kernels.attention_tiles import Operands, Plan, aligned, changed, channel_tiles
from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.operator import operator
from minitriton.kernels.rows import new_like

MOST_HEADS = 65_535  # the second dimension of a grid


def packed_attention(
    qkv: torch.Tensor,
    heads: int,
    *,
    causal: bool = True,
    dropout: float = 0.0,
    seed: int | torch.Tensor | None = None,
    precision: str = "tf32x3",
) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v per head, [B, T, heads D], contiguous; differentiable.

    qkv: [B, T, 3 heads D] in fp32, bf16 or fp16, D in 1..256: the queries of all heads, their keys,
    their values. causal, dropout, seed and precision: as for `attention`, whose masks it has.
    KernelArgumentError names the argument that does not fit.
    """
    q = _check(qkv, heads)
    settings = check_settings(q, None, dropout, seed, None, precision, None)
    return _op(
        qkv, heads, settings["seed"], check_bool("causal", causal), settings["dropout"], precision
    )[0]


def packed_attention_reference(
    qkv: torch.Tensor,
    heads: int,
    *,
    causal: bool = True,
    dropout: float = 0.0,
    seed: int | torch.Tensor = 0,
) -> torch.Tensor:
    """`packed_attention` in plain torch, in the dtype of qkv."""
    out, _ = attention_reference(*_parts(qkv, heads), causal=causal, dropout=dropout, seed=seed)
    return out.flatten(2)


def _check(qkv: object, heads: object) -> torch.Tensor:
    """The queries, if all of it fits."""
    tensor = checks.float_tensor("qkv", qkv)
    count = checks.whole("heads", heads, MOST_HEADS)
    if tensor.dim() != 3 or tensor.shape[2] == 0 or tensor.shape[2] % (3 * count):
        raise KernelArgumentError(
            f"argument 'qkv': shape {tuple(tensor.shape)}; {count} heads need [B, T, {3 * count} D]"
        )
    check_width("qkv", tensor.shape[2] // (3 * count))
    return _parts(tensor, count)[0]


def _parts(qkv: torch.Tensor, heads: int) -> tuple[torch.Tensor, ...]:
    """Views of the queries, keys and values, [B, T, heads, D] each."""
    return qkv.unflatten(2, (3, heads, qkv.shape[2] // (3 * heads))).unbind(2)


def _call(
    qkv: torch.Tensor, heads: int, seed: torch.Tensor | None, causal: bool, dropout: float,
    precision: str,
) -> tuple[Operands, Plan]:  # fmt: skip
    q, k, v = (aligned(x) for x in _parts(qkv, heads))
    width = q.shape[3]
    head = channel_tiles(width, width, q.element_size())["HEAD"]
    rest = k[..., head:] if head < width else k
    call = Operands(q, k, rest, v, None, None, seed, width**-0.5, dropout)
    return call, call.plan(causal, False, precision)


@operator("packed_attention")
def _op(
    qkv: torch.Tensor, heads: int, seed: torch.Tensor | None, causal: bool, dropout: float,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The result, and lse [B, H, T]."""
    out, lse = _outputs(qkv, heads)
    if out.numel() > 0:
        call, plan = _call(qkv, heads, seed, causal, dropout, precision)
        attention_forward.forward(call, plan, out.unflatten(2, (heads, -1)), lse)
    return out, lse


@operator("packed_attention_backward")
def _backward_op(
    grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, qkv: torch.Tensor, heads: int,
    seed: torch.Tensor | None, causal: bool, dropout: float, precision: str,
) -> torch.Tensor:  # fmt: skip
    dqkv = _like(qkv)
    if dqkv.numel() > 0:
        call, plan = _call(qkv, heads, seed, causal, dropout, precision)
        o, do = (x.unflatten(2, (heads, -1)) for x in (out, grad))
        prepared = attention_backward.prepare(call, plan, o, lse, do, None, lse)
        dq, dk, dv = _parts(dqkv, heads)
        plan = changed(plan, APART=3)
        attention_backward.backward(call, plan, *prepared, dq, dk, dq, dv)
    return dqkv


def _outputs(qkv: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    batch, tokens, width = qkv.shape
    out = torch.empty(batch, tokens, width // 3, dtype=qkv.dtype, device=qkv.device)
    return out, torch.empty(batch, heads, tokens, dtype=torch.float32, device=qkv.device)


def _like(qkv: torch.Tensor) -> torch.Tensor:
    return new_like(qkv)


_op.register_fake(lambda qkv, heads, *_: _outputs(qkv, heads))
_backward_op.register_fake(lambda grad, out, lse, qkv, *_: _like(qkv))


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    qkv, heads, seed, *options = inputs
    ctx.save_for_backward(*output, qkv, seed)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.heads, ctx.options = heads, options


def _differentiate(ctx: Any, grad: torch.Tensor | None, _: Any) -> Any:
    if grad is None:
        return (None,) * 6
    out, lse, qkv, seed = ctx.saved_tensors
    dqkv = _backward_op(grad, out, lse, qkv, ctx.heads, seed, *ctx.options)
    return dqkv, None, None, None, None, None


_op.register_autograd(_differentiate, setup_context=_save)
