"""Kernels of the routed experts with MXFP4 weights and fp8 activations (W4A8).

Activations are e4m3 with one scale per row, amax / 448. A code becomes e5m2 with its block's scale,
relative to the largest of the row's 128 channels: exact for scales up to 2^26 apart. A table of the
eight magnitudes fits in two registers, and one byte permutation looks four codes up. The sum of 128
channels goes into the fp32 sum times that largest scale; longer sums would lose bits, of which
Hopper keeps some 14. Rows whose scales lie further apart are computed once more, block by block.
What is not exact are the activations alone: e4m3 keeps 3 bits, 2.6e-2 rms.

A thread has a block of 32 codes of a row, as in `mxfp4_tiles`; so has each row of channels.

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
    weight_ptrs,
)
from minitriton.kernels.rows import new_like

SIGNS: tl.constexpr = tl.constexpr(-0x7F7F7F80)  # bit 7 of each byte of a word
TOP: tl.constexpr = tl.constexpr(27)  # exponent of e5m2 where 0.5 goes: as 6 becomes 1.5 * 2^15
LARGEST: tl.constexpr = tl.constexpr(448.0)  # of e4m3


@triton.jit
def channel_at8(position):
    """The channel at a position of the activations' order.

    Position bits: 0-1 byte of a word's even or odd codes, 2-3 block of 32, 4 odd, 5-6 word.
    """
    block, word = (position & 12) << 3, (position >> 2) & 24
    return (position & -128) | block | word | ((position & 3) << 1) | ((position >> 4) & 1)


@triton.jit
def _pick(low, high, selector):
    """The bytes of two words, eight in all, that the selector's four lower half bytes name."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, selector], tl.int32, True, 1
    )


@triton.jit
def _bytes(word):
    """The bytes [N, 4, 4, 2, 2] of words [N, 4, 4]."""
    b0, b1 = word.to(tl.int8), (word >> 8).to(tl.int8)
    b2, b3 = (word >> 16).to(tl.int8), (word >> 24).to(tl.int8)
    return tl.join(tl.join(b0, b2), tl.join(b1, b3))


@triton.jit
def _unpack8(words, exponents, used, BLOCK_N: tl.constexpr, WARPS: tl.constexpr):
    """e5m2 [N, 128] of words [N, 4, 4] loaded in the order of `rows_at`: 2^-14 of the codes' values
    times 2^exponent of the block [N, 4], 1 to TOP; zero for blocks that are not used."""
    field = exponents * 4
    low = tl.where(used, field * 0x01010100 + 0x06040000, 0)[:, :, None]  # 0, 0.5, 1, 1.5
    high = tl.where(used, field * 0x01010101 + 0x0E0C0A08, 0)[:, :, None]  # 2, 3, 4, 6
    codes = words & 0x77777777
    first, second = _pick(low, high, codes), _pick(low, high, codes >> 16)
    even = _pick(first, second, 0x6420) | ((words << 4) & SIGNS)
    odd = _pick(first, second, 0x7531) | (words & SIGNS)
    w = tl.permute(tl.join(_bytes(even), _bytes(odd)), (0, 2, 5, 1, 3, 4))
    w = natural_rows(tl.reshape(w, [BLOCK_N, 128]), BLOCK_N, WARPS)
    return w.to(tl.float8e5, bitcast=True)


@triton.jit
def _scale8(byte, BLOCK_N: tl.constexpr, WARPS: tl.constexpr):
    """[N, 1] what `_unpack8` leaves of the scale where the byte [N], at least 14, has TOP."""
    scale = ((byte - (TOP - 14)) << 23).to(tl.float32, bitcast=True)
    return natural_rows(scale[:, None], BLOCK_N, WARPS)


@triton.jit
def _product8(
    a_ptrs, words_ptr, scales_ptr, row, depth, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """W A^T [N, ROWS] of rows of weights in the order of `rows_at`; depth is a multiple of 128."""
    ptrs, scale_ptrs = weight_ptrs(words_ptr, scales_ptr, row, depth)
    steps = depth // 128
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    lowest = tl.full([BLOCK_N, 4], 1, tl.int32)
    scales = tl.load(scale_ptrs)  # words come through shared memory; single bytes a step ahead
    for i in tl.range(steps):
        byte = scales.to(tl.int32)
        scales = tl.load(scale_ptrs + tl.minimum(i + 1, steps - 1) * 4)
        top = tl.maximum(tl.max(byte, axis=1), 14)
        exponents = byte - top[:, None] + TOP
        lowest = tl.minimum(lowest, exponents)
        w = _unpack8(tl.load(ptrs + i * 16), exponents, byte >= 0, BLOCK_N, WARPS)
        a = tl.trans(tl.load(a_ptrs + i * 128))
        product = tl.dot(w, a, max_num_imprecise_acc=128)
        acc += product * _scale8(top, BLOCK_N, WARPS)
    if tl.min(lowest) < 1:
        acc = _by_blocks(a_ptrs, ptrs, scale_ptrs, steps, ROWS, BLOCK_N, WARPS)
    return acc


@triton.jit
def _by_blocks(
    a_ptrs, ptrs, scale_ptrs, steps, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr
):
    """`_product8` for scales of any distance: a product per block, in which the others are zero."""
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    block = tl.arange(0, 4)[None, :]
    for i in tl.range(4 * steps, num_stages=2):
        byte = tl.load(scale_ptrs + i // 4 * 4).to(tl.int32)
        used = block == i % 4
        own = tl.max(tl.where(used, byte, 0), axis=1)
        top = tl.maximum(own, 14)
        exponents = tl.zeros([BLOCK_N, 4], tl.int32) + (own - top + TOP)[:, None]
        w = _unpack8(tl.load(ptrs + i // 4 * 16), exponents, used, BLOCK_N, WARPS)
        a = tl.trans(tl.load(a_ptrs + i // 4 * 128))
        product = tl.dot(w, a, max_num_imprecise_acc=128)
        acc += product * _scale8(top, BLOCK_N, WARPS)
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
    z_ptrs = z_ptr + token[:, None] * depth + tl.arange(0, 128)[None, :]
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
    a_ptrs = a_ptr + row[:, None] * depth + tl.arange(0, 128)[None, :]
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
    out = new_like(x, torch.float8_e4m3fn)
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
    words, scales = w13.view(torch.int32), w13_scales
    up_w4a8_kernel[(tiles * triton.cdiv(ff, config["BLOCK_N"] // 2),)](
        *quantise(z), words, scales, act, token_of_row, expert_of_tile, tiles, ff, latent, beta1,
        beta2 or 1.0, CAPPED=beta2 is not None, **config,
    )  # fmt: skip
    words, scales = w2.view(torch.int32), w2_scales
    config |= {"BLOCK_N": 64, "num_warps": 4, "WARPS": 4}
    rows_w4a8_kernel[(tiles * triton.cdiv(latent, config["BLOCK_N"]),)](
        *quantise(act, token_of_row), words, scales, y, expert_of_tile, tiles, latent, ff, **config
    )
    return y
