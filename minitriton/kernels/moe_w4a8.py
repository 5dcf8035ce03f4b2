"""Kernels of the routed experts with MXFP4 weights and fp8 activations (W4A8).

Activations are e4m3 with one scale per row, amax / 448. A code becomes e4m3, exactly and four at a
time, by moving its bits to where e4m3 has sign, exponent and mantissa: a number 2^6 too small, 0.5
as a subnormal. The block's scale cannot go into e4m3 without loss, so each block of 32 channels is
a product of its own, whose result goes into the fp32 sum times the scale. That also keeps the sums
that Hopper makes of fp8 products, with some 14 bits, as short as one instruction. What is not exact
are the activations alone: e4m3 keeps 3 bits, 2.6e-2 rms.

The order of channels and rows is that of `mxfp4_tiles`, but for 32 channels at a time, of which a
thread has a word.

Source: Kimi K3 technical report, 4.1.4; OCP Microscaling Formats 1.0 and OFP8 for the encodings.
"""

from __future__ import annotations

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels.grouped_gemm import place
from minitriton.kernels.mxfp4_tiles import (
    glu_of,
    glu_rows_at,
    launch_config,
    natural_rows,
    rows_at,
)

SIGNS: tl.constexpr = tl.constexpr(-0x7F7F7F80)  # bit 7 of each byte of a word
MAGNITUDES: tl.constexpr = tl.constexpr(0x1C1C1C1C)  # bits 2 to 4: exponent and mantissa of E2M1
LARGEST: tl.constexpr = tl.constexpr(448.0)  # of e4m3


@triton.jit
def channel_at8(position):
    """The channel at a position of the activations' order.

    Position bits: 0-1 byte of a word's even or odd codes, 2-3 word of a block (3 counts less, so
    that the four words of neighbouring lanes are no run and each lane copies its own), 4 odd.
    """
    word = ((position & 4) << 2) | (position & 8)
    return (position & -32) | word | ((position & 3) << 1) | ((position >> 4) & 1)


@triton.jit
def _bytes(word):
    """The bytes [N, 4, 4] of words [N, 4]."""
    b0, b1 = word.to(tl.int8), (word >> 8).to(tl.int8)
    b2, b3 = (word >> 16).to(tl.int8), (word >> 24).to(tl.int8)
    return tl.join(tl.join(b0, b2), tl.join(b1, b3))


@triton.jit
def _unpack8(words, BLOCK_N: tl.constexpr, WARPS: tl.constexpr):
    """e4m3 [N, 32], 2^-6 of the codes' values, of words [N, 4] loaded in the order of `rows_at`."""
    even = ((words << 4) & SIGNS) | ((words << 2) & MAGNITUDES)
    odd = (words & SIGNS) | ((words >> 2) & MAGNITUDES)
    w = tl.permute(tl.join(_bytes(even), _bytes(odd)), (0, 4, 1, 2, 3))
    w = natural_rows(tl.reshape(w, [BLOCK_N, 32]), BLOCK_N, WARPS)
    return w.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _scale8(scales, b: tl.constexpr):
    """2^6 times the scale in byte b of words [N]."""
    byte = tl.minimum((scales >> (8 * b)) & 255, 248)
    return ((byte + 6) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _product8(
    a_ptrs, words_ptr, scales_ptr, row, depth, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """W A^T [N, ROWS] of rows of weights in the order of `rows_at`; depth is a multiple of 128."""
    lane = tl.arange(0, 4)
    word = ((lane & 1) << 1) | (lane >> 1)
    ptrs = words_ptr + row[:, None] * (depth // 8) + word[None, :]
    # one word has the scales of 128 channels; every lane that shares a row reads it
    scale_ptrs = scales_ptr + row[:, None] * (depth // 128) + (lane * 0)[None, :]
    steps = depth // 128
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    scales = tl.load(scale_ptrs)
    for i in tl.range(steps):
        current = natural_rows(tl.max(scales, axis=1)[:, None], BLOCK_N, WARPS)
        scales = tl.load(scale_ptrs + tl.minimum(i + 1, steps - 1))
        for b in tl.static_range(4):
            w = _unpack8(tl.load(ptrs + i * 16 + b * 4), BLOCK_N, WARPS)
            a = tl.trans(tl.load(a_ptrs + b * 32))
            acc += tl.dot(w, a, max_num_imprecise_acc=32) * _scale8(current, b)
        a_ptrs += 128
    return acc


@triton.jit
def up_w4a8_kernel(
    z_ptr, z_scale_ptr, words_ptr, scales_ptr, act_ptr, token_of_row_ptr, expert_of_tile_ptr,
    tiles, columns, depth, beta1, beta2, CAPPED: tl.constexpr, ROWS: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """bf16 act = SiTU-GLU(z W13^T) of gathered tokens; z and act have their channels in order."""
    tile, block = place(tiles, columns, BLOCK_N // 2, GROUP)
    expert = tl.load(expert_of_tile_ptr + tile // SPLIT).to(tl.int64)
    if expert < 0:
        return
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = tl.maximum(tl.load(token_of_row_ptr + row), 0).to(tl.int64)
    z_ptrs = z_ptr + token[:, None] * depth + tl.arange(0, 32)[None, :]
    n = expert * 2 * columns + glu_rows_at(block, columns, channel_at8, BLOCK_N, WARPS)
    h = _product8(z_ptrs, words_ptr, scales_ptr, n, depth, ROWS, BLOCK_N, WARPS)
    h = (h * tl.load(z_scale_ptr + token)[None, :]).to(tl.bfloat16)
    act = glu_of(h, beta1, beta2, CAPPED)
    at = block * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    tl.store(act_ptr + row[:, None] * columns + at[None, :], act)


@triton.jit
def rows_w4a8_kernel(
    a_ptr, a_scale_ptr, words_ptr, scales_ptr, out_ptr, expert_of_tile_ptr, tiles, columns, depth,
    ROWS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """out[row] = a[row] W_e^T in bf16; a has its channels in order."""
    tile, block = place(tiles, columns, BLOCK_N, GROUP)
    expert = tl.load(expert_of_tile_ptr + tile // SPLIT).to(tl.int64)
    if expert < 0:
        return
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    a_ptrs = a_ptr + row[:, None] * depth + tl.arange(0, 32)[None, :]
    n = expert * columns + (block * BLOCK_N + rows_at(BLOCK_N, WARPS)) % columns
    out = _product8(a_ptrs, words_ptr, scales_ptr, n, depth, ROWS, BLOCK_N, WARPS)
    out = (out * tl.load(a_scale_ptr + row)[None, :]).to(tl.bfloat16)
    at = block * BLOCK_N + tl.arange(0, BLOCK_N)
    out_ptrs = out_ptr + row[:, None] * columns + at[None, :]
    tl.store(out_ptrs, tl.trans(out), mask=(at < columns)[None, :])


@triton.jit
def quantise_kernel(
    x_ptr, out_ptr, scale_ptr, token_of_row_ptr, x_stride, columns, BLOCK: tl.constexpr
):
    """Rows of x as e4m3 and their scales. Given token_of_row: rows of padding stay as they are, and
    the channels are in order already; else they are put in the order of `channel_at8`."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.arange(0, BLOCK)
    channel = position
    if token_of_row_ptr is None:
        channel = channel_at8(position)
    elif tl.load(token_of_row_ptr + row) < 0:
        return
    mask = position < columns
    x = tl.load(x_ptr + row * x_stride + channel, mask=mask, other=0.0).to(tl.float32)
    peak = tl.maximum(tl.max(tl.abs(x)), 1e-30)
    tl.store(
        out_ptr + row * columns + position, (x * (LARGEST / peak)).to(tl.float8e4nv), mask=mask
    )
    tl.store(scale_ptr + row, peak / LARGEST)


def quantise(
    x: torch.Tensor, token_of_row: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 rows, fp32 scales [R]) of the rows of x, see `quantise_kernel`."""
    rows, columns = x.shape
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(columns)
    quantise_kernel[(rows,)](
        x, out, scales, token_of_row, x.stride(0), columns, BLOCK=block,
        num_warps=min(8, max(4, block // 1024)),
    )  # fmt: skip
    return out, scales


def expert_rows(
    z: torch.Tensor, w13: torch.Tensor, w13_scales: torch.Tensor, w2: torch.Tensor,
    w2_scales: torch.Tensor, token_of_row: torch.Tensor, expert_of_tile: torch.Tensor,
    beta1: float, beta2: float | None,
) -> torch.Tensor:  # fmt: skip
    """Experts' outputs by row, bf16 [R, latent]; rows of padding are undefined."""
    tiles, rows = expert_of_tile.shape[0], token_of_row.shape[0]
    latent, ff = z.shape[1], w13.shape[1] // 2
    config = launch_config(rows // tiles)
    tiles *= config["SPLIT"]
    act, y = z.new_empty(rows, ff), z.new_empty(rows, latent)
    words, scales = w13.view(torch.int32), w13_scales.view(torch.int32)
    up_w4a8_kernel[(tiles * triton.cdiv(ff, config["BLOCK_N"] // 2),)](
        *quantise(z), words, scales, act, token_of_row, expert_of_tile, tiles, ff, latent, beta1,
        beta2 or 1.0, CAPPED=beta2 is not None, **config,
    )  # fmt: skip
    words, scales = w2.view(torch.int32), w2_scales.view(torch.int32)
    rows_w4a8_kernel[(tiles * triton.cdiv(latent, config["BLOCK_N"]),)](
        *quantise(act, token_of_row), words, scales, y, expert_of_tile, tiles, latent, ff, **config
    )
    return y
