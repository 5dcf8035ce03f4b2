"""Tiles of MXFP4 weights as the left operands of tensor-core products, made in registers.

A product needs no particular order of its depth, only the same one on both sides. So each thread
keeps what it loaded: 16 bytes, a block of 32 codes of one row. The activations are put in the order
that this gives instead, 128 channels at a time (`channel_at`), by whoever writes them. The rows of
the weights come in such an order that no element has to leave its thread either (`rows_at`).
Products are transposed, weights on the left: then wgmma takes them from registers.

An E2M1 code becomes bf16 by moving its bits to where bf16 has sign, exponent and mantissa (a number
2^126 too small), two codes at a time, and one multiplication by the block's scale, which is exact.
That scale is 2^-64 of the true one, so that it cannot overflow; sums get the 2^64 back (`UNSCALE`).
"""

from __future__ import annotations

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels.grouped_gemm import GROUP
from minitriton.kernels.situ_gemm import glu

CHUNK = 128  # channels that are put in order together; depths are padded to a multiple of it
ORDER = 1024  # channels per program of the ordering kernel
UNSCALE: tl.constexpr = tl.constexpr(18446744073709551616.0)  # 2^64
SIGNS: tl.constexpr = tl.constexpr(-0x7FFF8000)  # bit 15 of both halves of a word
MAGNITUDES: tl.constexpr = tl.constexpr(0x01C001C0)  # bits 6 to 8: exponent and mantissa of E2M1


@triton.jit
def channel_at(position):
    """The channel at a position of the activations' order.

    Position bits: 0 half of a word, 1-2 block of 32, 3-4 code of the half, 5-6 word of the block.
    """
    block, word = (position & 6) << 4, (position >> 2) & 24
    return (position & -128) | block | word | ((position & 1) << 2) | ((position >> 3) & 3)


@triton.jit
def rows_at(BLOCK_N: tl.constexpr, WARPS: tl.constexpr):
    """Rows of a product's tile in the order in which threads load them: 8 per warp, then warps."""
    row = tl.arange(0, BLOCK_N)
    repeat = row // (8 * WARPS)
    return (row & 7) | (row // 8 % WARPS * 16) | ((repeat & 1) * 8) | (repeat // 2 * 16 * WARPS)


@triton.jit
def natural_rows(x, BLOCK_N: tl.constexpr, WARPS: tl.constexpr):
    """Rows [N, K] that were loaded in the order of `rows_at`, in their natural order."""
    K: tl.constexpr = x.shape[1]
    x = tl.reshape(x, [BLOCK_N // (16 * WARPS), 2, WARPS, 8, K])
    return tl.reshape(tl.permute(x, (0, 2, 1, 3, 4)), [BLOCK_N, K])


@triton.jit
def glu_rows_at(
    block, columns, CHANNEL_AT: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr
):
    """The same for gate and up rows in one tile, of the 2 `columns` of W13. Of 16 rows that a warp
    multiplies 8 are gate and 8 are up: a thread has both of its channels, which are in order."""
    row = rows_at(BLOCK_N, WARPS)
    position = block * (BLOCK_N // 2) + (row // 16 * 8 | row & 7)
    return CHANNEL_AT(position) % columns + (row // 8 & 1) * columns


@triton.jit
def glu_of(h, beta1, beta2, CAPPED: tl.constexpr):
    """bf16 SiTU-GLU [ROWS, N / 2] of a product [N, ROWS] of the rows of `glu_rows_at`."""
    N: tl.constexpr = h.shape[0]
    ROWS: tl.constexpr = h.shape[1]
    h = tl.permute(tl.reshape(h, [N // 16, 2, 8, ROWS]), (0, 2, 3, 1))
    gate, up = tl.split(tl.reshape(h, [N // 2, ROWS, 2]))
    act = glu(gate.to(tl.float32), up.to(tl.float32), beta1, beta2, CAPPED, False)
    return tl.trans(act.to(tl.bfloat16))


@triton.jit
def weight_ptrs(words_ptr, scales_ptr, row, depth):
    """Pointers to the words [N, 4, 4] and scales [N, 4] of the first 128 channels of rows."""
    block = tl.arange(0, 4)
    row_words = tl.multiple_of(depth // 8, 4)  # depth is a multiple of 32
    words = words_ptr + row[:, None, None] * row_words + block[None, :, None] * 4
    words += tl.arange(0, 4)[None, None, :]
    return words, scales_ptr + row[:, None] * (depth // 32) + block[None, :]


@triton.jit
def words_of(words_ptrs, i, depth):
    """Words [N, 4, 4] of the i-th 128 channels; zeros past the depth."""
    inside = (tl.arange(0, 4) * 32)[None, :, None] < depth - i * 128
    return tl.load(words_ptrs + i * 16, mask=inside, other=0)


@triton.jit
def scales_of(scales_ptrs, i, depth):
    """Scales [N, 4] of the i-th 128 channels; zeros past the depth."""
    inside = (tl.arange(0, 4) * 32)[None, :] < depth - i * 128
    return tl.load(scales_ptrs + i * 4, mask=inside, other=0)


@triton.jit
def _halves(bits, scale):
    """bf16 pairs of the fields in the two halves of words [N, 4, 4], times scale [N, 4]."""
    pair = tl.join(bits.to(tl.int16), (bits >> 16).to(tl.int16))
    return pair.to(tl.bfloat16, bitcast=True) * scale[:, :, None, None]


@triton.jit
def unpack(words, scales, BLOCK_N: tl.constexpr, WARPS: tl.constexpr):
    """bf16 [N, 128], 2^-64 of the weights, of words [N, 4, 4] and scales [N, 4] loaded for
    rows in the order of `rows_at`; they come out in their natural order."""
    field = ((tl.minimum(scales.to(tl.int32), 192) + 62) << 7).to(tl.int16)
    scale = field.to(tl.bfloat16, bitcast=True)
    w0 = _halves(((words << 12) & SIGNS) | ((words << 6) & MAGNITUDES), scale)
    w1 = _halves(((words << 8) & SIGNS) | ((words << 2) & MAGNITUDES), scale)
    w2 = _halves(((words << 4) & SIGNS) | ((words >> 2) & MAGNITUDES), scale)
    w3 = _halves((words & SIGNS) | ((words >> 6) & MAGNITUDES), scale)
    w = tl.join(tl.join(w0, w1), tl.join(w2, w3))
    w = tl.reshape(tl.permute(w, (0, 2, 5, 4, 1, 3)), [BLOCK_N, 128])
    return natural_rows(w, BLOCK_N, WARPS)


@triton.jit
def order_kernel(x_ptr, out_ptr, x_stride, out_stride, columns, BLOCK: tl.constexpr):
    """Rows of x with their channels in the order of `channel_at`, zeros past the last channel."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel = channel_at(position)
    x = tl.load(x_ptr + row * x_stride + channel, mask=channel < columns, other=0.0)
    tl.store(out_ptr + row * out_stride + position, x, mask=position < out_stride)


def launch_config(tile_rows: int) -> dict[str, int]:
    """BLOCK_N rows of weights by ROWS tokens; SPLIT programs share a larger tile. 64 rows of
    weights per warpgroup leave room for what is unpacked."""
    if tile_rows <= 16:  # little to compute: what counts is how much is on its way
        sizes = {"ROWS": tile_rows, "SPLIT": 1, "BLOCK_N": 128, "num_warps": 8, "num_stages": 4}
    else:
        split = {"ROWS": 64, "SPLIT": tile_rows // 64}
        sizes = split | {"BLOCK_N": 128, "num_warps": 8, "num_stages": 3}
    return sizes | {"WARPS": sizes["num_warps"], "GROUP": GROUP}
