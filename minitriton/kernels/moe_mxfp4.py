"""The routed experts with MXFP4 weights and bf16 activations (W4A16), for inference.

Same layer and same launches as `moe_experts`; the weights stay packed in memory. A program reads
words of eight codes two steps ahead into registers, makes bf16 of them there, which is exact,
and multiplies on tensor cores: Hopper has no MX products. A code becomes fp32 by moving its bits
to where fp32 has sign, exponent and mantissa (a number 2^126 too small) and one multiplication by
the block's scale. That scale is 2^-64 of the true one, so that it cannot overflow; the sum gets the
2^64 back.

Source: Kimi K3 technical report, 4.1.4 (only the routed experts are MXFP4).
"""

from __future__ import annotations

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels import checks, grouped_gemm
from minitriton.kernels.grouped_gemm import place
from minitriton.kernels.moe_experts import check_norm, check_routing, launch_sum
from minitriton.kernels.moe_routing import Routing
from minitriton.kernels.mxfp4 import check_mxfp4
from minitriton.kernels.operator import operator
from minitriton.kernels.rows import dense
from minitriton.kernels.situ_gemm import store_glu

UNSCALE: tl.constexpr = tl.constexpr(18446744073709551616.0)  # 2^64
CODE_BITS: tl.constexpr = tl.constexpr(
    -0x7E400000
)  # sign and the low three of fp32's bits 22 to 30


@triton.jit
def _codes(words, scale, NUMBER: tl.constexpr):
    """That code of each word, times scale, in bf16."""
    bits = ((words << (28 - 4 * NUMBER)) >> 6) & CODE_BITS
    return (bits.to(tl.float32, bitcast=True) * scale).to(tl.bfloat16)


@triton.jit
def _unpack(words, scales, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """bf16 [K, N], 2^-64 of the weights, of words [N, K / 32, 4] and scales [N, K / 32]."""
    bits = (tl.minimum(scales.to(tl.int32), 192) + 62) << 23
    scale = bits.to(tl.float32, bitcast=True)[:, :, None]
    c04 = tl.join(_codes(words, scale, 0), _codes(words, scale, 4))
    c15 = tl.join(_codes(words, scale, 1), _codes(words, scale, 5))
    c26 = tl.join(_codes(words, scale, 2), _codes(words, scale, 6))
    c37 = tl.join(_codes(words, scale, 3), _codes(words, scale, 7))
    w = tl.join(tl.join(c04, c26), tl.join(c15, c37))
    return tl.trans(tl.reshape(w, [BLOCK_N, BLOCK_K]))


@triton.jit
def _weight_ptrs(words_ptr, scales_ptr, expert, n, columns, depth, BLOCK_K: tl.constexpr):
    """Pointers to the words [N, K / 32, 4] and scales [N, K / 32] of rows n of an expert."""
    row = expert * columns + n
    g = tl.arange(0, BLOCK_K // 32)
    row_words = tl.multiple_of(depth // 8, 4)  # depth is a multiple of 32
    words = words_ptr + row[:, None, None] * row_words + g[None, :, None] * 4
    words += tl.arange(0, 4)[None, None, :]
    return words, scales_ptr + row[:, None] * (depth // 32) + g[None, :]


@triton.jit
def _fetch(words_ptrs, scales_ptrs, i, depth, BLOCK_K: tl.constexpr):
    """Words and scales of the i-th step through the depth; zeros past its end."""
    left = depth - i * BLOCK_K
    inside = (tl.arange(0, BLOCK_K // 32) * 32)[None, :] < left
    words = tl.load(words_ptrs + i * (BLOCK_K // 8), mask=inside[:, :, None], other=0)
    return words, tl.load(scales_ptrs + i * (BLOCK_K // 32), mask=inside, other=0)


@triton.jit
def up_mxfp4_kernel(
    z_ptr, words_ptr, scales_ptr, act_ptr, token_of_row_ptr, expert_of_tile_ptr,
    z_stride, tiles, columns, depth, beta1, beta2, CAPPED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tile, block = place(tiles, columns, BLOCK_N, GROUP)
    expert = tl.load(expert_of_tile_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = tl.maximum(tl.load(token_of_row_ptr + row), 0).to(tl.int64)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    z_ptrs = z_ptr + token[:, None] * z_stride + k[None, :]
    words_ptrs, scales_ptrs = _weight_ptrs(
        words_ptr, scales_ptr, expert, n % columns, 2 * columns, depth, BLOCK_K
    )
    words_up = columns.to(tl.int64) * tl.multiple_of(depth // 8, 4)
    scales_up = columns.to(tl.int64) * (depth // 32)
    up_ptrs, up_scales_ptrs = words_ptrs + words_up, scales_ptrs + scales_up
    gate = tl.zeros([ROWS, BLOCK_N], tl.float32)
    up = tl.zeros([ROWS, BLOCK_N], tl.float32)
    # registers hold the weights of this step and of the next two
    gate0, gate_scales0 = _fetch(words_ptrs, scales_ptrs, 0, depth, BLOCK_K)
    up0, up_scales0 = _fetch(up_ptrs, up_scales_ptrs, 0, depth, BLOCK_K)
    gate1, gate_scales1 = _fetch(words_ptrs, scales_ptrs, 1, depth, BLOCK_K)
    up1, up_scales1 = _fetch(up_ptrs, up_scales_ptrs, 1, depth, BLOCK_K)
    for i in tl.range(tl.cdiv(depth, BLOCK_K)):
        a = tl.load(z_ptrs, mask=k[None, :] < depth - i * BLOCK_K, other=0.0)
        z_ptrs += BLOCK_K
        gate2, gate_scales2 = _fetch(words_ptrs, scales_ptrs, i + 2, depth, BLOCK_K)
        up2, up_scales2 = _fetch(up_ptrs, up_scales_ptrs, i + 2, depth, BLOCK_K)
        gate = tl.dot(a, _unpack(gate0, gate_scales0, BLOCK_N, BLOCK_K), gate)
        up = tl.dot(a, _unpack(up0, up_scales0, BLOCK_N, BLOCK_K), up)
        gate0, gate_scales0, up0, up_scales0 = gate1, gate_scales1, up1, up_scales1
        gate1, gate_scales1, up1, up_scales1 = gate2, gate_scales2, up2, up_scales2
    mask = (n < columns)[None, :]
    act_ptrs = act_ptr + row[:, None] * columns + n[None, :]
    store_glu(
        gate * UNSCALE, up * UNSCALE, act_ptrs, act_ptrs, columns, mask, beta1, beta2, CAPPED,
        False, False,
    )  # fmt: skip


@triton.jit
def rows_mxfp4_kernel(
    a_ptr, words_ptr, scales_ptr, out_ptr, expert_of_tile_ptr, tiles, columns, depth,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tile, block = place(tiles, columns, BLOCK_N, GROUP)
    expert = tl.load(expert_of_tile_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + row[:, None] * depth + k[None, :]
    words_ptrs, scales_ptrs = _weight_ptrs(
        words_ptr, scales_ptr, expert, n % columns, columns, depth, BLOCK_K
    )
    acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
    words0, scales0 = _fetch(words_ptrs, scales_ptrs, 0, depth, BLOCK_K)
    words1, scales1 = _fetch(words_ptrs, scales_ptrs, 1, depth, BLOCK_K)
    for i in tl.range(tl.cdiv(depth, BLOCK_K)):
        a = tl.load(a_ptrs, mask=k[None, :] < depth - i * BLOCK_K, other=0.0)
        a_ptrs += BLOCK_K
        words2, scales2 = _fetch(words_ptrs, scales_ptrs, i + 2, depth, BLOCK_K)
        acc = tl.dot(a, _unpack(words0, scales0, BLOCK_N, BLOCK_K), acc)
        words0, scales0, words1, scales1 = words1, scales1, words2, scales2
    out_ptrs = out_ptr + row[:, None] * columns + n[None, :]
    tl.store(out_ptrs, (acc * UNSCALE).to(tl.bfloat16), mask=(n < columns)[None, :])


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
) -> torch.Tensor:
    """`moe_experts` with MXFP4 weights, for inference: nothing may require a gradient.

    z: [T, latent] bf16; w13, w13_scales: uint8 [E, 2 ff, latent / 2] and [E, 2 ff, latent / 32];
    w2, w2_scales: [E, latent, ff / 2] and [E, latent, ff / 32], as `mxfp4_quantize` gives them;
    latent and ff multiples of 32. Scales up to 2^65 are exact, and so are weights of at least
    2^-62. Routing, weights, betas, norm and result as in `moe_experts`. KernelArgumentError names
    the argument that does not fit.
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
        checks.positive("eps", eps),
    )  # fmt: skip


def _config(rows: int) -> dict[str, int]:
    if rows <= 16:
        return {"BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3}
    return {"BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4 if rows < 128 else 8, "num_stages": 3}


@operator("moe_experts_mxfp4")
def _moe_experts_mxfp4_op(
    z: torch.Tensor, w13: torch.Tensor, w13_scales: torch.Tensor, w2: torch.Tensor,
    w2_scales: torch.Tensor, weights: torch.Tensor, row_of_slot: torch.Tensor,
    token_of_row: torch.Tensor, expert_of_tile: torch.Tensor, beta1: float, beta2: float | None,
    norm_weight: torch.Tensor | None, eps: float,
) -> torch.Tensor:  # fmt: skip
    u = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    tiles, rows = expert_of_tile.shape[0], token_of_row.shape[0]
    if tiles == 0:
        return u.zero_()
    x = dense(z)
    latent, ff, tile = z.shape[1], w13.shape[1] // 2, rows // tiles
    config = _config(tile) | {"ROWS": tile, "GROUP": grouped_gemm.GROUP}
    act, y = z.new_empty(rows, ff), z.new_empty(rows, latent)
    up_mxfp4_kernel[(tiles * triton.cdiv(ff, config["BLOCK_N"]),)](
        x, w13.view(torch.int32), w13_scales, act, token_of_row, expert_of_tile, x.stride(0), tiles,
        ff, latent, beta1, beta2 or 1.0, CAPPED=beta2 is not None, **config,
    )  # fmt: skip
    rows_mxfp4_kernel[(tiles * triton.cdiv(latent, config["BLOCK_N"]),)](
        act, w2.view(torch.int32), w2_scales, y, expert_of_tile, tiles, latent, ff, **config
    )
    launch_sum(y, weights, row_of_slot, u, norm_weight, eps)
    return u


_moe_experts_mxfp4_op.register_fake(
    lambda z, *rest: torch.empty(z.shape, dtype=z.dtype, device=z.device)
)
