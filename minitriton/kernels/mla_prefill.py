"""Gated multi-head latent attention in its expanded form, as in prefill and training.

    s_h = scale (q_h[:N] . k_nope_h + q_h[N:] . k_shared)        causal; k_shared serves all heads
    out_h = sigmoid(gate_h) * softmax(s_h) v_h

Source: Kimi K3 technical report, section 2.1.2: N = 128 channels, 64 shared ones, never rotated,
and scale = 1/sqrt(192). `rope` rotates the shared channels of q and k_shared for models that do.
The kernels are those of `attention`, where the shared channels are a second tile of k.
"""

from __future__ import annotations

from typing import Any

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels.attention import (
    attend,
    attention_reference,
    check_bool,
    check_q,
    check_settings,
    check_shape,
    check_width,
)
from minitriton.kernels.attention_tiles import aligned
from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.operator import operator
from minitriton.kernels.rows import new_like

HEADS = 16  # rotated by one program

Rope = tuple[torch.Tensor, torch.Tensor]


@triton.jit(do_not_specialize=("batch_stride", "token_stride", "head_stride", "tokens", "heads"))
def _rotate_kernel(
    x_ptr, cos_ptr, sin_ptr, out_ptr, batch_stride, token_stride, head_stride, tokens, heads,
    direction, FIRST: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = FIRST + 2 * HALF
    token, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    channel = tl.arange(0, BLOCK)[None, :]
    x_ptr += batch * batch_stride + token.to(tl.int64) * token_stride
    turned = (channel >= FIRST) & (channel < WIDTH)
    mask = (head < heads) & (channel < WIDTH)
    upper = channel >= FIRST + HALF
    partner = tl.where(upper, channel - HALF, channel + HALF)
    pair = token.to(tl.int64) * HALF + tl.where(upper, channel - HALF, channel) - FIRST
    x = tl.load(x_ptr + head * head_stride + channel, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(x_ptr + head * head_stride + partner, mask=mask & turned, other=0.0)
    other = tl.where(upper, other.to(tl.float32), -other.to(tl.float32))
    cos = tl.load(cos_ptr + pair, mask=turned, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + pair, mask=turned, other=0.0).to(tl.float32) * direction
    out = x * cos + other * sin
    out_ptr += (batch * tokens + token) * heads * WIDTH
    tl.store(out_ptr + head * WIDTH + channel, out.to(out_ptr.dtype.element_ty), mask=mask)


def mla_attention(
    q: torch.Tensor,
    k_nope: torch.Tensor,
    k_shared: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor | None = None,
    *,
    rope: Rope | None = None,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    return_lse: bool = False,
    precision: str = "tf32x3",
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention whose last R channels of k are shared by all heads, under a sigmoid gate.

    q: [B, T, H, N + R], k_nope: [B, T, H, N], k_shared: [B, T, R], v: [B, T, H, V] (K3: N = 128,
    R = 64, V = 128; N a multiple of 8, N + R and V at most 256), one dtype (fp32, bf16 or fp16);
    gate: [B, T, H, V] or None for no gate, any of these dtypes. Strided views are read in place
    where `attention` does so. The result is [B, T, H, V], contiguous, in the dtype of q or in
    `out_dtype` (K3 trains with fp32), and with return_lse also lse [B, H, T] in fp32, natural
    logarithm. All five are differentiable; the gradient of k_shared sums over the heads in one
    fixed order, so nothing varies between runs.

    rope: (cos, sin), each [T, R / 2], without gradients: channels i and i + R / 2 of the shared
    ones turn together by the angle of pair i of their token, in q and k_shared. scale: positive,
    default 1 / sqrt(N + R). `cu_seqlens` and `precision` are as in `attention`; packed sequences
    bring their own rows of cos and sin. KernelArgumentError names the argument that does not fit.
    """
    query = check_q(q)
    batch, tokens, heads, width = query.shape
    check_shape("k_nope", k_nope, (batch, tokens, heads, None), query)
    check_width("k_nope", k_nope.shape[3])
    if k_nope.shape[3] % 8:
        raise KernelArgumentError(
            f"argument 'k_nope': {k_nope.shape[3]} channels; it must be a multiple of 8"
        )
    rest = width - k_nope.shape[3]
    if rest < 1:
        raise KernelArgumentError(
            f"argument 'k_nope': {k_nope.shape[3]} channels leave none of the {width} of 'q' to "
            "'k_shared'"
        )
    check_shape("k_shared", k_shared, (batch, tokens, rest), query)
    check_shape("v", v, (batch, tokens, heads, None), query)
    check_width("v", v.shape[3])
    if gate is not None:
        check_shape("gate", gate, tuple(v.shape), query, exact=False)
    settings = check_settings(query, scale, 0.0, None, cu_seqlens, precision, out_dtype)
    if rope is not None:
        cos, sin = _check_rope(rope, query, rest)
        query = _rotate_op(query, cos, sin, width - rest, 1.0)
        k_shared = _rotate_op(k_shared[:, :, None], cos, sin, 0, 1.0)[:, :, 0]
    out, lse = attend(query, k_nope, k_shared, v, gate, causal=True, **settings)
    return (out, lse) if check_bool("return_lse", return_lse) else out


def mla_attention_reference(
    q: torch.Tensor,
    k_nope: torch.Tensor,
    k_shared: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor | None = None,
    *,
    rope: Rope | None = None,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of `mla_attention` in plain torch, in the dtype of its arguments."""
    rest = k_shared.shape[2]
    shared = k_shared[:, :, None]
    if rope is not None:
        turned = _rotate_reference(q[..., -rest:], *rope)
        q, shared = torch.cat([q[..., :-rest], turned], -1), _rotate_reference(shared, *rope)
    k = torch.cat([k_nope, shared.expand(-1, -1, q.shape[2], -1)], -1)
    out, lse = attention_reference(q, k, v, scale=scale, cu_seqlens=cu_seqlens)
    return out if gate is None else out * torch.sigmoid(gate), lse


def _rotate_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat([low * c - high * s, high * c + low * s], -1)


def _check_rope(rope: object, q: torch.Tensor, rest: int) -> Rope:
    if not isinstance(rope, tuple) or len(rope) != 2:
        raise KernelArgumentError("argument 'rope': must be a pair (cos, sin) or None")
    if rest % 2:
        raise KernelArgumentError(f"argument 'rope': needs an even number of channels, not {rest}")
    pairs = [
        check_shape(f"rope {name}", x, (q.shape[1], rest // 2), q, exact=False)
        for name, x in zip(("cos", "sin"), rope, strict=True)
    ]
    if any(x.requires_grad for x in pairs):
        raise KernelArgumentError("argument 'rope': has no gradient; detach cos and sin")
    return pairs[0], pairs[1]


@operator("rotate")
def _rotate_op(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, first: int, direction: float
) -> torch.Tensor:
    """Channels from `first` on of x [B, T, H, C] turned; the others as they are."""
    out = new_like(x)
    if out.numel() == 0:
        return out
    rows = aligned(x)
    batch, tokens, heads, width = x.shape
    block = min(HEADS, triton.next_power_of_2(heads))
    _rotate_kernel[tokens, triton.cdiv(heads, block), batch](
        rows, cos.contiguous(), sin.contiguous(), out, *rows.stride()[:3], tokens, heads,
        direction, FIRST=first, HALF=(width - first) // 2, ROWS=block,
        BLOCK=max(32, triton.next_power_of_2(width)), num_warps=4 if block > 1 else 1,
    )  # fmt: skip
    return out


_rotate_op.register_fake(lambda x, cos, sin, first, direction: new_like(x))


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    _, cos, sin, ctx.first, ctx.direction = inputs
    ctx.save_for_backward(cos, sin)


def _differentiate(ctx: Any, grad: torch.Tensor) -> Any:
    return _rotate_op(grad, *ctx.saved_tensors, ctx.first, -ctx.direction), None, None, None, None


_rotate_op.register_autograd(_differentiate, setup_context=_save)
