"""KDA backward, the serial part: gradients of the states, from the last chunk to the first.

With D the gradient of the state that leaves a chunk, dO that of the output, and the operands of
`kda_forward`:

    dV' = P^T dO + k_out D    X = T^T dV'    D <- q_in^T dO + diag(decay) D - (beta k_in)^T X

X is the gradient of v - k_in S divided by beta.
"""

from __future__ import annotations

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels import kda_tiles as tiles
from minitriton.kernels.kda_chunks import Chunks
from minitriton.kernels.kda_forward import Operands, Options, block

STAGES = tl.constexpr(2)


@triton.jit(do_not_specialize=["tokens"])
def _reverse_scan_kernel(
    q_in_ptr, k_in_ptr, k_out_ptr, decay_ptr, inverse_ptr, scores_ptr, dout_ptr, beta_ptr,
    chunk_ptr, sequence_ptr, dfinal_ptr, dinitial_ptr, dstates_ptr, x_ptr,
    dout_batch, dout_token, dout_head, beta_batch, beta_token, beta_head, tokens, heads, keys,
    columns, key_stride, column_stride,
    SIGMOID: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    sequence, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    DTYPE: tl.constexpr = q_in_ptr.dtype.element_ty
    row, key = tl.arange(0, tiles.CHUNK), tl.arange(0, BLOCK)
    column = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    inside = column[None, :] < columns
    state_at = key[:, None] * key_stride + column[None, :] * column_stride
    state_at += (sequence * heads + head) * (keys * columns)
    state_mask = (key[:, None] < keys) & inside
    if dfinal_ptr is None:
        dstate = tl.zeros([BLOCK, VALUES], tl.float32)
    else:
        dstate = tl.load(dfinal_ptr + state_at, mask=state_mask, other=0.0)

    operand_at = row[:, None] * BLOCK + key[None, :]
    square_at = row[:, None] * tiles.CHUNK + row[None, :]
    begin, count = tl.load(sequence_ptr + 2 * sequence), tl.load(sequence_ptr + 2 * sequence + 1)
    for i in tl.range(0, count, num_stages=STAGES):
        chunk = begin + count - 1 - i
        first, rows = tl.load(chunk_ptr + 3 * chunk + 1), tl.load(chunk_ptr + 3 * chunk + 2)
        batch, token = (first // tokens).to(tl.int64), (first % tokens).to(tl.int64)
        tile = chunk.to(tl.int64) * heads + head
        mask = (row < rows)[:, None] & inside
        dout_at = dout_ptr + batch * dout_batch + token * dout_token + head.to(tl.int64) * dout_head
        dout_at += row.to(tl.int64)[:, None] * dout_token + column[None, :]
        dout = tl.load(dout_at, mask=mask, other=0.0).to(DTYPE)
        scores = tl.load(scores_ptr + tile * (tiles.CHUNK * tiles.CHUNK) + square_at)
        dvalues = tl.dot(tl.trans(scores), dout, input_precision=PRECISION)
        leaving = dstate.to(DTYPE)
        at = tile * (keys * columns) + key[:, None] * columns + column[None, :]
        tl.store(dstates_ptr + at, leaving, mask=state_mask)
        # each operand is loaded where it is used: were they not pipelined, registers would not do
        k_out = tl.load(k_out_ptr + tile * (tiles.CHUNK * BLOCK) + operand_at)
        dvalues = tl.dot(k_out, leaving, dvalues, input_precision=PRECISION).to(DTYPE)
        inverse = tl.load(inverse_ptr + tile * (tiles.CHUNK * tiles.CHUNK) + square_at)
        x = tl.dot(tl.trans(inverse), dvalues, input_precision=PRECISION)
        x_at = ((first + row).to(tl.int64) * heads + head)[:, None] * columns + column[None, :]
        tl.store(x_ptr + x_at, x.to(DTYPE), mask=mask)
        q_in = tl.load(q_in_ptr + tile * (tiles.CHUNK * BLOCK) + operand_at)
        decay = tl.load(decay_ptr + tile * BLOCK + key)
        dstate = tl.dot(tl.trans(q_in), dout, dstate * decay[:, None], input_precision=PRECISION)
        beta_head_ptr = beta_ptr + batch * beta_batch + token * beta_token + head * beta_head
        beta = tiles.load_beta(beta_head_ptr, beta_token, rows, SIGMOID)
        dread = (x * -beta[:, None]).to(DTYPE)
        k_in = tl.load(k_in_ptr + tile * (tiles.CHUNK * BLOCK) + operand_at)
        dstate = tl.dot(tl.trans(k_in), dread, dstate, input_precision=PRECISION)
    if dinitial_ptr is not None:
        tl.store(dinitial_ptr + state_at, dstate, mask=state_mask)


def reverse_scan(
    operands: Operands, dout: torch.Tensor, beta: torch.Tensor, dfinal: torch.Tensor | None,
    dinitial: torch.Tensor | None, options: Options, chunks: Chunks, dstates: torch.Tensor,
    x: torch.Tensor,
) -> None:  # fmt: skip
    """Fills dstates [NC, H, K, V], D of every chunk, x [B, T, H, V], and dinitial unless None.

    dout: [B, T, H, V], last stride 1; dfinal, dinitial: contiguous, laid out as the states.
    """
    heads, columns, keys = x.shape[2], x.shape[3], dstates.shape[2]
    exact, programs = x.dtype == torch.float32, len(chunks.sequence) * heads
    wide, warps = _tile(exact, programs)
    wide = min(wide, block(columns))
    if programs:
        _reverse_scan_kernel[(programs, triton.cdiv(columns, wide))](
            *operands[:6], dout, beta, chunks.chunk, chunks.sequence, dfinal, dinitial, dstates, x,
            *dout.stride()[:3], *beta.stride(), x.shape[1], heads, keys, columns,
            *((1, keys) if options.value_major else (columns, 1)), SIGMOID=options.beta_sigmoid,
            PRECISION="tf32x3" if exact else "tf32", BLOCK=operands.q_in.shape[3], VALUES=wide,
            num_warps=warps,
        )  # fmt: skip


def _tile(exact: bool, programs: int) -> tuple[int, int]:
    """Columns of V that a program holds, and its warps: narrow where there are few sequences."""
    if exact:
        return 16, 8
    return (64, 8) if programs >= 64 else (32, 8)
