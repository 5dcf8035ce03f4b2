"""Kernels of mixture-of-experts layers: matrix products grouped by expert, gathers and sums.

Rows are (token, expert) pairs sorted by expert; the rows of an expert start at a multiple of ROWS,
so each tile of ROWS rows belongs to one expert. `token_of_row` names a row's token (-1: padding),
`expert_of_tile` a tile's expert (-1: no tile), `row_of_slot` [T, k] the row of a token's j-th
expert (-1: another rank's). Padding rows compute with token 0 and nobody reads what they give.
Grids are static: programs of tiles that are not there leave at once.
Everything is deterministic: sums over a token's experts and over blocks run in a fixed order.

Sources: Kimi K3 technical report, 2.3; SonicMoE for the gather fused into the load and for the
gradient of the routing weights without the experts' outputs.
"""

from __future__ import annotations

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels.situ_gemm import glu_backward, product, store_glu

GROUP = 8  # tiles that walk through the blocks of the weights together and share them in L2


@triton.jit
def weight_rows(first, columns, BLOCK_N: tl.constexpr):
    """Rows of W13 [2 columns, depth] that belong to the columns from `first` on: BLOCK_N of the
    gate, then the same of `up`. Columns that are not there wrap round."""
    n = tl.arange(0, 2 * BLOCK_N)
    return (first + n % BLOCK_N) % columns + (n // BLOCK_N) * columns


@triton.jit
def glu_product(
    a_ptrs, b_ptrs, depth, b_stride, EVEN: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(gate, up) of a left operand [ROWS, depth] and the right one of `weight_rows`, as one wide
    product: it reads the left operand once."""
    acc = tl.zeros([ROWS, 2 * BLOCK_N], tl.float32)
    acc = product(a_ptrs, b_ptrs, acc, depth, 1, b_stride, EVEN, BLOCK_K, PRECISION)
    return acc.reshape(ROWS, 2, BLOCK_N).permute(0, 2, 1).split()


@triton.jit
def place(tiles, columns, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    blocks = tl.cdiv(columns, BLOCK_N)
    pid = tl.program_id(0)
    return tl.swizzle2d(pid // blocks, pid % blocks, tiles, blocks, GROUP)


@triton.jit
def up_kernel(
    z_ptr, w_ptr, act_ptr, h_ptr, token_of_row_ptr, expert_of_tile_ptr,
    z_stride, expert_stride, n_stride, k_stride, tiles, columns, depth, beta1, beta2,
    CAPPED: tl.constexpr, EXACT: tl.constexpr, SAVE: tl.constexpr, EVEN: tl.constexpr,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """act = SiTU-GLU(z W13^T) of gathered tokens; with SAVE also h = z W13^T, rounded.

    The experts' tiles have PARTS * ROWS rows; a part that is all padding is left as it is."""
    tile, block = place(tiles * PARTS, columns, BLOCK_N, GROUP)
    expert = tl.load(expert_of_tile_ptr + tile // PARTS).to(tl.int64)
    first = token_of_row_ptr + tile.to(tl.int64) * ROWS
    if (expert < 0) | (tl.load(first) < 0):
        return
    token = tl.maximum(tl.load(first + tl.arange(0, ROWS)), 0).to(tl.int64)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    z_ptrs = z_ptr + token[:, None] * z_stride + k[None, :]
    wide = weight_rows(block * BLOCK_N, columns, BLOCK_N).to(tl.int64)
    w_ptrs = w_ptr + expert * expert_stride + wide[None, :] * n_stride + k[:, None] * k_stride
    gate, up = glu_product(z_ptrs, w_ptrs, depth, k_stride, EVEN, ROWS, BLOCK_N, BLOCK_K, PRECISION)
    mask = None if WHOLE else (n < columns)[None, :]
    store_glu(
        gate, up, act_ptr, h_ptr, tile * ROWS, n, columns, mask, beta1, beta2, CAPPED, EXACT, SAVE
    )


@triton.jit
def rows_kernel(
    a_ptr, w_ptr, out_ptr, token_of_row_ptr, expert_of_tile_ptr,
    a_stride, expert_stride, n_stride, k_stride, tiles, columns, depth,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out[row] = a[row] B_e with B_e[k, n] at w + e expert_stride + n n_stride + k k_stride; given
    token_of_row, a[token_of_row[row]]."""
    tile, block = place(tiles, columns, BLOCK_N, GROUP)
    expert = tl.load(expert_of_tile_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    expert = tl.maximum(expert, 0)  # which a tensor map needs to know
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    source = row
    if token_of_row_ptr is not None:
        source = tl.maximum(tl.load(token_of_row_ptr + row), 0).to(tl.int64)
    a_ptrs = a_ptr + source[:, None] * a_stride + k[None, :]
    b_ptrs = w_ptr + expert * expert_stride
    b_ptrs += (n % columns).to(tl.int64)[None, :] * n_stride + k[:, None] * k_stride
    acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
    acc = product(a_ptrs, b_ptrs, acc, depth, 1, k_stride, EVEN, BLOCK_K, PRECISION)
    out_ptrs = out_ptr + row[:, None] * columns + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=(n < columns)[None, :])


@triton.jit
def glu_backward_kernel(
    dact_ptr, h_ptr, weights_ptr, dh_ptr, act_ptr, dweights_ptr,
    token_of_row_ptr, row_of_slot_ptr, expert_of_tile_ptr, tile_rows, columns, slots, beta1, beta2,
    CAPPED: tl.constexpr, EXACT: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of dact = du W2 through p SiTU-GLU(h): dh, p * act for dW2, and dp at its slot."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(token_of_row_ptr + row).to(tl.int64)
    if (token < 0) | (tl.load(expert_of_tile_ptr + row // tile_rows) < 0):
        return
    j = tl.arange(0, SLOTS)
    at_slot = token * slots + j
    mine = tl.load(row_of_slot_ptr + at_slot, mask=j < slots, other=-1) == row
    p = tl.sum(tl.load(weights_ptr + at_slot, mask=mine, other=0.0))
    element = dh_ptr.dtype.element_ty
    h_ptr += row * (2 * columns)
    dh_ptr += row * (2 * columns)
    dots = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mask = at < columns
        d = tl.load(dact_ptr + row * columns + at, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(h_ptr + at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(h_ptr + columns + at, mask=mask, other=0.0).to(tl.float32)
        act, dgate, dup = glu_backward(gate, up, beta1, beta2, CAPPED, EXACT)
        dots += d * act
        tl.store(act_ptr + row * columns + at, (p * act).to(element), mask=mask)
        tl.store(dh_ptr + at, (p * d * dgate).to(element), mask=mask)
        tl.store(dh_ptr + columns + at, (p * d * dup).to(element), mask=mask)
    tl.store(dweights_ptr + at_slot, tl.zeros([SLOTS], tl.float32) + tl.sum(dots), mask=mine)


@triton.jit
def weights_backward_kernel(
    a_ptr, b_ptr, dw_ptr, offsets_ptr, counts_ptr, rows, columns,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """dw[e] = sum over the rows r of expert e of a[r]^T b[r]; zero for an expert without rows."""
    expert = tl.program_id(1)
    m_blocks, n_blocks = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    pid = tl.program_id(0)
    m_block, n_block = tl.swizzle2d(pid // n_blocks, pid % n_blocks, m_blocks, n_blocks, GROUP)
    m = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    n = n_block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    first = tl.load(offsets_ptr + expert).to(tl.int64)
    count = tl.load(counts_ptr + expert)
    a_ptrs = a_ptr + first * rows + (m % rows)[:, None] + k[None, :] * rows
    b_ptrs = b_ptr + first * columns + (n % columns)[None, :] + k[:, None] * columns
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc = product(a_ptrs, b_ptrs, acc, count, rows, columns, False, BLOCK_K, PRECISION)
    dw_ptrs = dw_ptr + expert.to(tl.int64) * rows * columns
    dw_ptrs += m.to(tl.int64)[:, None] * columns + n[None, :]
    mask = (m < rows)[:, None] & (n < columns)[None, :]
    tl.store(dw_ptrs, acc.to(dw_ptr.dtype.element_ty), mask=mask)


@triton.jit
def combine_kernel(
    rows_ptr, weights_ptr, row_of_slot_ptr, norm_ptr, out_ptr, columns, eps,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over j = 0, 1, ... of weights[t, j] * rows[row_of_slot[t, j]], in fp32; with
    norm_ptr, the RMS norm of that sum as it would have been stored. No weights: they are 1."""
    slot = tl.program_id(0).to(tl.int64) * SLOTS
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < columns
    element = out_ptr.dtype.element_ty
    acc = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(SLOTS):
        row = tl.load(row_of_slot_ptr + slot + j).to(tl.int64)
        x = tl.load(rows_ptr + row * columns + at, mask=mask & (row >= 0), other=0.0)
        if weights_ptr is not None:
            acc += x.to(tl.float32) * tl.load(weights_ptr + slot + j)
        else:
            acc += x.to(tl.float32)
    if norm_ptr is not None:
        acc = acc.to(element).to(tl.float32)
        scale = tl.rsqrt(tl.sum(acc * acc) / columns + eps)
        acc = acc * scale * tl.load(norm_ptr + at, mask=mask, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + tl.program_id(0).to(tl.int64) * columns + at
    tl.store(out_ptrs, acc.to(element), mask=mask)


@triton.jit
def gather_kernel(x_ptr, token_of_row_ptr, out_ptr, x_stride, columns, BLOCK: tl.constexpr):
    """out[row] = x[token_of_row[row]]; rows of padding stay as they are."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_of_row_ptr + row).to(tl.int64)
    mask = (at < columns) & (token >= 0)
    x = tl.load(x_ptr + token * x_stride + at, mask=mask)
    tl.store(out_ptr + row * columns + at, x, mask=mask)
