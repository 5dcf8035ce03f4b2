"""The products that decoding with multi-head latent attention absorbs into queries and outputs.

    query  = [ q_nope W_UK,h | rotate(q_shared) ]       per head h: 128 -> 512, then 64 as they are
    values = sigmoid(gate) * (W_UV,h o_latent)          per head h: 512 -> 128

Source: Kimi K3 technical report, section 2.1.2: k_h = W_UK,h c and v_h = W_UV,h c are never made,
as q . (W_UK c) = (q W_UK) . c and sum p (W_UV c) = W_UV (sum p c). fp32 inside; fp32 tensors are
multiplied as three tf32 products.
"""

from __future__ import annotations

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels import checks
from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.mla_cache import Rope, check_rope, rotate, rotate_reference
from minitriton.kernels.operator import operator
from minitriton.kernels.rows import dense

COLUMNS = 128  # of a tile of the result
DEPTH = 64  # latent channels multiplied at a time
MOST_CHANNELS = 256  # of a head


@triton.jit(do_not_specialize=["tokens", "heads"])
def _absorb_kernel(
    q_ptr, weight_ptr, shared_ptr, cos_ptr, sin_ptr, out_ptr, q_token, q_head, weight_head,
    weight_row, shared_token, shared_head, tokens, heads,
    CHANNELS: tl.constexpr, DEPTH: tl.constexpr, LATENT: tl.constexpr, SHARED: tl.constexpr,
    ROPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    head, column = tl.program_id(0).to(tl.int64), tl.program_id(2) * COLUMNS
    token = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = (token < tokens)[:, None]
    out_row = out_ptr + ((token * heads + head) * (LATENT + SHARED))[:, None]
    if column < LATENT:
        depth = tl.arange(0, DEPTH)
        kept = depth < CHANNELS
        q = tl.load(
            q_ptr + head * q_head + (token * q_token)[:, None] + depth[None, :],
            mask=inside & kept[None, :], other=0.0,
        )  # fmt: skip
        at = column + tl.arange(0, COLUMNS)[None, :]
        weight = tl.load(
            weight_ptr + head * weight_head + (depth * weight_row)[:, None] + at,
            mask=kept[:, None], other=0.0,
        )  # fmt: skip
        out = tl.dot(q, weight, input_precision="tf32x3")
        tl.store(out_row + at, out.to(out_ptr.dtype.element_ty), mask=inside)
    else:  # one program of a row of tiles copies the shared channels
        half = tl.arange(0, SHARED // 2)[None, :]
        shared_ptr += head * shared_head
        from_row = shared_ptr + (token * shared_token)[:, None] + half
        first = tl.load(from_row, mask=inside)
        second = tl.load(from_row + SHARED // 2, mask=inside)
        if ROPE:
            angle = (token * (SHARED // 2))[:, None] + half
            cos, sin = tl.load(cos_ptr + angle, mask=inside), tl.load(sin_ptr + angle, mask=inside)
            first, second = rotate(first.to(tl.float32), second.to(tl.float32), cos, sin)
        out_row += LATENT + half
        tl.store(out_row, first.to(out_ptr.dtype.element_ty), mask=inside)
        tl.store(out_row + SHARED // 2, second.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "heads"])
def _value_kernel(
    latent_ptr, weight_ptr, gate_ptr, out_ptr, latent_token, latent_head, weight_head, weight_row,
    gate_token, gate_head, tokens, heads, channels,
    LATENT: tl.constexpr, BY_CHANNEL: tl.constexpr, GATE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    token = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside, kept = (token < tokens)[:, None], column < channels
    depth = tl.arange(0, DEPTH)
    from_row = latent_ptr + head * latent_head + (token * latent_token)[:, None] + depth[None, :]
    weight_ptr += head * weight_head
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, LATENT, DEPTH):
        latent = tl.load(from_row + start, mask=inside, other=0.0)
        at = start + depth
        if BY_CHANNEL:  # the weight is [channels, latent]
            weight = tl.load(
                weight_ptr + (column * weight_row)[:, None] + at[None, :],
                mask=kept[:, None], other=0.0,
            )  # fmt: skip
            weight = tl.trans(weight)
        else:
            weight = tl.load(
                weight_ptr + (at * weight_row)[:, None] + column[None, :],
                mask=kept[None, :], other=0.0,
            )  # fmt: skip
        acc = tl.dot(latent, weight, acc, input_precision="tf32x3")
    mask = inside & kept[None, :]
    if GATE:
        gate = tl.load(
            gate_ptr + head * gate_head + (token * gate_token)[:, None] + column[None, :],
            mask=mask, other=0.0,
        )  # fmt: skip
        acc *= tl.sigmoid(gate.to(tl.float32))
    out_row = out_ptr + ((token * heads + head) * channels)[:, None] + column[None, :]
    tl.store(out_row, acc.to(out_ptr.dtype.element_ty), mask=mask)


def mla_absorb_query(
    q_nope: torch.Tensor, w_uk: torch.Tensor, q_shared: torch.Tensor, *, rope: Rope | None = None
) -> torch.Tensor:
    """The queries of `mla_decode`, [B, n, H, L + R]: q_nope W_UK per head, then q_shared.

    q_nope: [B, n, H, D], D <= 256; w_uk: [H, D, L], the key half of kv_b's weight; q_shared:
    [B, n, H, R]; one dtype (fp32, bf16 or fp16) and device; L is a power of two of at least 32, R
    one of at least 16 (K3: D = 128, L = 512, R = 64). Views with contiguous last dimensions, such
    as the parts of one projection, are read in place. rope: (cos, sin), each fp32 [B, n, R / 2]; if
    given, channels i and i + R / 2 of q_shared are turned by the token's angle i. The result is
    contiguous. No gradients. KernelArgumentError names the argument that does not fit.
    """
    checks.no_gradient(
        "train with mla_attention", q_nope=q_nope, w_uk=w_uk, q_shared=q_shared, rope=rope
    )
    _check_activations("q_nope", q_nope)
    _check_weight("w_uk", w_uk, q_nope)
    if w_uk.shape[:2] != q_nope.shape[2:] or w_uk.shape[1] > MOST_CHANNELS:
        raise KernelArgumentError(
            f"argument 'w_uk': shape {tuple(w_uk.shape)}; 'q_nope' of shape {tuple(q_nope.shape)} "
            f"needs [{q_nope.shape[2]}, {q_nope.shape[3]}, L], of at most {MOST_CHANNELS} channels"
        )
    _check_power("w_uk", w_uk.shape[2], 32)
    checks.like_but_shape("q_shared", q_shared, "q_nope", q_nope)
    if q_shared.dim() != 4 or q_shared.shape[:3] != q_nope.shape[:3]:
        raise KernelArgumentError(
            f"argument 'q_shared': shape {tuple(q_shared.shape)}; it must be "
            f"{[*q_nope.shape[:3], 'R']}"
        )
    _check_power("q_shared", q_shared.shape[3], 16)
    return _absorb_op(q_nope, w_uk, q_shared, *check_rope(rope, q_shared[:, :, 0]))


def mla_absorb_query_reference(
    q_nope: torch.Tensor, w_uk: torch.Tensor, q_shared: torch.Tensor, *, rope: Rope | None = None
) -> torch.Tensor:
    """`mla_absorb_query` in plain torch, in the dtype of its arguments."""
    latent = torch.einsum("bnhd,hdl->bnhl", q_nope, w_uk)
    if rope is not None:
        rope = (rope[0][:, :, None], rope[1][:, :, None])
    return torch.cat([latent, rotate_reference(q_shared, rope).to(latent.dtype)], -1)


def mla_value_up(
    o_latent: torch.Tensor, w_uv: torch.Tensor, gate: torch.Tensor | None = None
) -> torch.Tensor:
    """The heads' outputs [B, n, H, D] of `mla_decode`'s result: sigmoid(gate) * (W_UV o_latent).

    o_latent: [B, n, H, L], L a power of two of at least 32; w_uv: [H, D, L], the value half of
    kv_b's weight, or [H, L, D] (D = L: the first is meant), any D >= 1; gate: [B, n, H, D] or
    [B, n, H * D], the logits of the output gate; one dtype (fp32, bf16 or fp16) and device. Views
    with contiguous last dimensions are read in place. The result is contiguous. No gradients.
    KernelArgumentError names the argument that does not fit.
    """
    checks.no_gradient("train with mla_attention", o_latent=o_latent, w_uv=w_uv, gate=gate)
    _check_activations("o_latent", o_latent)
    _check_power("o_latent", o_latent.shape[3], 32)
    _check_weight("w_uv", w_uv, o_latent)
    heads, latent = o_latent.shape[2:]
    if w_uv.shape[0] != heads or latent not in w_uv.shape[1:] or not w_uv.numel():
        raise KernelArgumentError(
            f"argument 'w_uv': shape {tuple(w_uv.shape)}; 'o_latent' of shape "
            f"{tuple(o_latent.shape)} needs [{heads}, D, {latent}] or [{heads}, {latent}, D]"
        )
    by_channel = w_uv if w_uv.shape[2] == latent else w_uv.transpose(1, 2)
    if gate is not None:
        checks.like_but_shape("gate", gate, "o_latent", o_latent)
        wanted = (*o_latent.shape[:3], by_channel.shape[1])
        if gate.shape not in (wanted, (*wanted[:2], wanted[2] * wanted[3])):
            raise KernelArgumentError(
                f"argument 'gate': shape {tuple(gate.shape)}; it must be {wanted}, perhaps with "
                "its last two dimensions as one"
            )
        gate = gate.reshape(wanted)
    return _value_op(o_latent, by_channel, gate)


def mla_value_up_reference(
    o_latent: torch.Tensor, w_uv: torch.Tensor, gate: torch.Tensor | None = None
) -> torch.Tensor:
    """`mla_value_up` in plain torch, in the dtype of its arguments."""
    by_channel = w_uv if w_uv.shape[2] == o_latent.shape[3] else w_uv.transpose(1, 2)
    out = torch.einsum("bnhl,hdl->bnhd", o_latent, by_channel)
    return out if gate is None else out * torch.sigmoid(gate.reshape(out.shape))


def _check_activations(name: str, value: object) -> None:
    x = checks.float_tensor(name, value)
    if x.dim() != 4 or 0 in x.shape[2:]:
        raise KernelArgumentError(
            f"argument '{name}': shape {tuple(x.shape)}; it must be [B, n, H, channels]"
        )


def _check_weight(name: str, value: object, like: torch.Tensor) -> None:
    weight = checks.like_but_shape(name, value, "q_nope" if name == "w_uk" else "o_latent", like)
    if weight.dim() != 3:
        raise KernelArgumentError(
            f"argument '{name}': shape {tuple(weight.shape)}; it must have three dimensions"
        )


def _check_power(name: str, channels: int, least: int) -> None:
    if channels < least or channels & (channels - 1):
        raise KernelArgumentError(
            f"argument '{name}': {channels} channels in its last dimension; a power of two of at "
            f"least {least} is needed"
        )


def _tokens(x: torch.Tensor) -> torch.Tensor:
    """[B, n, H, C] as [B n, H, C] with contiguous channels: a view where strides allow one."""
    return dense(x.reshape(-1, *x.shape[2:]))


def _rows(tokens: int) -> int:
    return min(64, max(16, triton.next_power_of_2(tokens)))


@operator("mla_absorb_query")
def _absorb_op(
    q_nope: torch.Tensor, w_uk: torch.Tensor, q_shared: torch.Tensor, cos: torch.Tensor | None,
    sin: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    out = _empty_query(q_nope, w_uk, q_shared)
    if out.numel() == 0:
        return out
    q, weight, shared = _tokens(q_nope), dense(w_uk), _tokens(q_shared)
    angles = [shared if table is None else table.contiguous() for table in (cos, sin)]
    tokens, heads, channels = q.shape
    rows, latent = _rows(tokens), weight.shape[2]
    columns = min(COLUMNS if q.dtype != torch.float32 else COLUMNS // 4, latent)
    _absorb_kernel[(heads, triton.cdiv(tokens, rows), latent // columns + 1)](
        q, weight, shared, *angles, out, q.stride(0), q.stride(1), weight.stride(0),
        weight.stride(1), shared.stride(0), shared.stride(1), tokens, heads, CHANNELS=channels,
        DEPTH=max(16, triton.next_power_of_2(channels)), LATENT=latent, SHARED=shared.shape[2],
        ROPE=cos is not None, ROWS=rows, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return out


@operator("mla_value_up")
def _value_op(
    o_latent: torch.Tensor, w_uv: torch.Tensor, gate: torch.Tensor | None
) -> torch.Tensor:
    out = _empty_values(o_latent, w_uv)
    if out.numel() == 0:
        return out
    x = _tokens(o_latent)
    weight = w_uv if 1 in w_uv.stride()[1:] else w_uv.contiguous()
    by_channel = weight.stride(2) == 1
    logits = x if gate is None else _tokens(gate)
    tokens, heads, latent = x.shape
    channels, rows = weight.shape[1], _rows(tokens)
    columns = min(COLUMNS // 2, max(16, triton.next_power_of_2(channels)))
    _value_kernel[(heads, triton.cdiv(tokens, rows), triton.cdiv(channels, columns))](
        x, weight, logits, out, x.stride(0), x.stride(1), weight.stride(0),
        weight.stride(1 if by_channel else 2), logits.stride(0), logits.stride(1), tokens, heads,
        channels, LATENT=latent, BY_CHANNEL=by_channel, GATE=gate is not None, ROWS=rows,
        COLUMNS=columns, DEPTH=min(DEPTH, latent), num_warps=4,
    )  # fmt: skip
    return out


def _empty_query(q_nope: torch.Tensor, w_uk: torch.Tensor, q_shared: torch.Tensor) -> torch.Tensor:
    width = w_uk.shape[2] + q_shared.shape[3]
    return torch.empty(*q_nope.shape[:3], width, dtype=q_nope.dtype, device=q_nope.device)


def _empty_values(o_latent: torch.Tensor, w_uv: torch.Tensor) -> torch.Tensor:
    shape = (*o_latent.shape[:3], w_uv.shape[1])
    return torch.empty(shape, dtype=o_latent.dtype, device=o_latent.device)


_absorb_op.register_fake(lambda q, weight, shared, cos, sin: _empty_query(q, weight, shared))
_value_op.register_fake(lambda latent, weight, gate: _empty_values(latent, weight))
