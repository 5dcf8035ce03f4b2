"""The routed experts with MXFP4 weights and bf16 (W4A16) or fp8 activations (W4A8), for inference.

Same layer as `moe_experts`; the weights stay packed in memory. A program reads words of eight codes
ahead into registers, makes bf16 of them there, which is exact, and multiplies on tensor cores:
Hopper has no MX products (`mxfp4_tiles`). One launch more than `moe_experts` puts the channels of
the tokens in order. fp8 activations are in `moe_w4a8`.

Source: Kimi K3 technical report, 4.1.4 (only the routed experts are MXFP4).
"""

from __future__ import annotations

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels import checks, moe_w4a8
from minitriton.kernels.grouped_gemm import place
from minitriton.kernels.moe_experts import check_norm, check_routing, launch_sum
from minitriton.kernels.moe_routing import Routing
from minitriton.kernels.mxfp4 import check_mxfp4
from minitriton.kernels.mxfp4_tiles import (
    CHUNK,
    ORDER,
    UNSCALE,
    channel_at,
    glu_of,
    glu_rows_at,
    launch_config,
    order_kernel,
    rows_at,
    scales_of,
    unpack,
    weight_ptrs,
    words_of,
)
from minitriton.kernels.operator import operator
from minitriton.kernels.rows import dense, new_like


@triton.jit
def _product(
    a_ptrs, words_ptr, scales_ptr, row, depth, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """bf16 W A^T [N, ROWS] of rows of weights in the order of `rows_at`; a has its channels in
    order."""
    ptrs, scale_ptrs = weight_ptrs(words_ptr, scales_ptr, row, depth)
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    # words come through shared memory; scales, single bytes, are loaded a step ahead
    scales = scales_of(scale_ptrs, 0, depth)
    for i in tl.range(tl.cdiv(depth, 128)):
        a = tl.trans(tl.load(a_ptrs))
        a_ptrs += 128
        following = scales_of(scale_ptrs, i + 1, depth)
        acc = tl.dot(unpack(words_of(ptrs, i, depth), scales, BLOCK_N, WARPS), a, acc)
        scales = following
    return (acc * UNSCALE).to(tl.bfloat16)


@triton.jit
def up_mxfp4_kernel(
    z_ptr, words_ptr, scales_ptr, act_ptr, token_of_row_ptr, expert_of_tile_ptr,
    z_stride, act_stride, tiles, columns, depth, beta1, beta2, CAPPED: tl.constexpr,
    ROWS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """act = SiTU-GLU(z W13^T) of gathered tokens; z and act have their channels in order. BLOCK_N
    rows of weights, gate and up, make half as many channels of act."""
    tile, block = place(tiles, act_stride, BLOCK_N // 2, GROUP)
    expert = tl.load(expert_of_tile_ptr + tile // SPLIT).to(tl.int64)
    if expert < 0:
        return
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = tl.maximum(tl.load(token_of_row_ptr + row), 0).to(tl.int64)
    z_ptrs = z_ptr + token[:, None] * z_stride + tl.arange(0, 128)[None, :]
    at = block * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    n = expert * 2 * columns + glu_rows_at(block, columns, channel_at, BLOCK_N, WARPS)
    h = _product(z_ptrs, words_ptr, scales_ptr, n, depth, ROWS, BLOCK_N, WARPS)
    act = glu_of(h, beta1, beta2, CAPPED)  # of what is rounded, as in `moe_experts`
    act_ptrs = act_ptr + row[:, None] * act_stride + at[None, :]
    tl.store(act_ptrs, act)


@triton.jit
def rows_mxfp4_kernel(
    a_ptr, words_ptr, scales_ptr, out_ptr, expert_of_tile_ptr, a_stride, tiles, columns, depth,
    ROWS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """out[row] = a[row] W_e^T; a has its channels in order."""
    tile, block = place(tiles, columns, BLOCK_N, GROUP)
    expert = tl.load(expert_of_tile_ptr + tile // SPLIT).to(tl.int64)
    if expert < 0:
        return
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    a_ptrs = a_ptr + row[:, None] * a_stride + tl.arange(0, 128)[None, :]
    n = (block * BLOCK_N + rows_at(BLOCK_N, WARPS)) % columns
    out = _product(a_ptrs, words_ptr, scales_ptr, expert * columns + n, depth, ROWS, BLOCK_N, WARPS)
    at = block * BLOCK_N + tl.arange(0, BLOCK_N)
    out_ptrs = out_ptr + row[:, None] * columns + at[None, :]
    tl.store(out_ptrs, tl.trans(out), mask=(at < columns)[None, :])


def moe_experts_mxfp4(
    z: torch.Tensor,
    w13: torch.Tensor,
    w13_scales: torch.Tensor,
    w2: torch.Tensor,
    w2_scales: torch.Tensor,
    routing: Routing,
    weights: torch.Tensor | None = None,
    beta1: float = 4.0,
    beta2: float | None = 25.0,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-5,
    activations: str = "bf16",
) -> torch.Tensor:
    """`moe_experts` with MXFP4 weights, for inference: nothing may require a gradient.

    z: [T, latent] bf16; w13, w13_scales: uint8 [E, 2 ff, latent / 2] and [E, 2 ff, latent / 32];
    w2, w2_scales: [E, latent, ff / 2] and [E, latent, ff / 32], as `mxfp4_quantize` gives them;
    latent and ff multiples of 32. Scales up to 2^65 are exact, and so are weights of at least
    2^-62. Routing, weights, betas, norm and result as in `moe_experts`.
    activations: "bf16", or "fp8", where tokens and activations are rounded to e4m3 with a scale per
    row (2.6e-2 rms) and the products run as fp8: needs latent and ff multiples of 128; all scales
    are exact, those of a row's 128 channels that are more than 2^26 apart at a quarter of the
    speed. KernelArgumentError names the argument that does not fit.
    """
    check_mxfp4("w13", w13, "w13_scales", w13_scales)
    check_mxfp4("w2", w2, "w2_scales", w2_scales)
    if not isinstance(z, torch.Tensor) or z.dtype != torch.bfloat16 or z.dim() != 2:
        raise checks.KernelArgumentError("argument 'z': it must be a [T, latent] bfloat16 tensor")
    if w13.dim() != 3 or w13.shape[1] % 64 or 2 * w13.shape[2] != z.shape[1] or 0 in w13.shape[1:]:
        raise checks.KernelArgumentError(
            f"argument 'w13': shape {tuple(w13.shape)}; 'z' of shape {tuple(z.shape)} needs "
            f"(E, 2 ff, {z.shape[1] // 2}) with ff a multiple of 32"
        )
    wanted = (w13.shape[0], z.shape[1], w13.shape[1] // 4)
    if w2.shape != wanted:
        raise checks.KernelArgumentError(
            f"argument 'w2': shape {tuple(w2.shape)}; 'w13' of shape {tuple(w13.shape)} needs "
            f"{wanted}"
        )
    if activations not in ("bf16", "fp8"):
        raise checks.KernelArgumentError(
            f"argument 'activations': {activations!r}; it must be 'bf16' or 'fp8'"
        )
    if activations == "fp8" and (z.shape[1] % CHUNK or w2.shape[2] * 2 % CHUNK):
        raise checks.KernelArgumentError(
            f"argument 'activations': 'fp8' needs latent and ff multiples of {CHUNK}, not "
            f"{z.shape[1]} and {w2.shape[2] * 2}"
        )
    p = check_routing(z, w13.shape[0], routing, weights)
    for name, x in {"w13": w13, "w13_scales": w13_scales, "w2": w2, "w2_scales": w2_scales}.items():
        if x.device != z.device or not x.is_contiguous():
            raise checks.KernelArgumentError(
                f"argument '{name}': it must be contiguous on {z.device}, the device of 'z'"
            )
    check_norm(z, norm_weight)
    checks.no_gradient(
        "use moe_experts or torch.no_grad()", z=z, weights=p, norm_weight=norm_weight
    )
    cap = None if beta2 is None else checks.positive("beta2", beta2)
    return _moe_experts_mxfp4_op(
        z, w13, w13_scales, w2, w2_scales, p, routing.row_of_slot, routing.token_of_row,
        routing.expert_of_tile, checks.positive("beta1", beta1), cap, norm_weight,
        checks.positive("eps", eps), activations == "fp8",
    )  # fmt: skip


def _in_order(x: torch.Tensor) -> torch.Tensor:
    """x with its channels in the weights' order, padded with zeros."""
    out = x.new_empty(x.shape[0], triton.cdiv(x.shape[1], CHUNK) * CHUNK)
    order_kernel[(x.shape[0], triton.cdiv(out.shape[1], ORDER))](
        x, out, x.stride(0), out.stride(0), x.shape[1], BLOCK=ORDER
    )
    return out


def _expert_rows(
    z: torch.Tensor, w13: torch.Tensor, w13_scales: torch.Tensor, w2: torch.Tensor,
    w2_scales: torch.Tensor, token_of_row: torch.Tensor, expert_of_tile: torch.Tensor,
    beta1: float, beta2: float | None,
) -> torch.Tensor:  # fmt: skip
    """Experts' outputs by row, bf16 [R, latent]; rows of padding are undefined."""
    tiles, rows = expert_of_tile.shape[0], token_of_row.shape[0]
    latent, ff = z.shape[1], w13.shape[1] // 2
    config = launch_config(rows // tiles)
    tiles *= config["SPLIT"]
    x = _in_order(z)
    act = z.new_empty(rows, triton.cdiv(ff, CHUNK) * CHUNK)
    y = z.new_empty(rows, latent)
    up_mxfp4_kernel[(tiles * triton.cdiv(act.shape[1], config["BLOCK_N"] // 2),)](
        x, w13.view(torch.int32), w13_scales, act, token_of_row, expert_of_tile, x.stride(0),
        act.stride(0), tiles, ff, latent, beta1, beta2 or 1.0, CAPPED=beta2 is not None, **config,
    )  # fmt: skip
    rows_mxfp4_kernel[(tiles * triton.cdiv(latent, config["BLOCK_N"]),)](
        act, w2.view(torch.int32), w2_scales, y, expert_of_tile, act.stride(0), tiles, latent, ff,
        **config,
    )  # fmt: skip
    return y


@operator("moe_experts_mxfp4")
def _moe_experts_mxfp4_op(
    z: torch.Tensor, w13: torch.Tensor, w13_scales: torch.Tensor, w2: torch.Tensor,
    w2_scales: torch.Tensor, weights: torch.Tensor, row_of_slot: torch.Tensor,
    token_of_row: torch.Tensor, expert_of_tile: torch.Tensor, beta1: float, beta2: float | None,
    norm_weight: torch.Tensor | None, eps: float, fp8: bool,
) -> torch.Tensor:  # fmt: skip
    u = new_like(z)
    if expert_of_tile.shape[0] == 0:
        return u.zero_()
    rows = moe_w4a8.expert_rows if fp8 else _expert_rows
    y = rows(dense(z), w13, w13_scales, w2, w2_scales, token_of_row, expert_of_tile, beta1, beta2)
    launch_sum(y, weights, row_of_slot, u, norm_weight, eps)
    return u


_moe_experts_mxfp4_op.register_fake(lambda z, *rest: new_like(z))
