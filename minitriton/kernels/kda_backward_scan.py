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
from minitriton.kernels import kda_states
from minitriton.kernels import kda_tiles as tiles
from minitriton.kernels.kda_chunks import Chunks
from minitriton.kernels.kda_forward import Operands, Options, block, scan_tile
from minitriton.kernels.kda_states import ScanTile


@triton.jit
def _load_dout(ptr, stride, rows, left, column, columns, DTYPE: tl.constexpr, TURNED: tl.constexpr):
    """dO of a chunk from its first element on, zero beyond `rows`; transposed if TURNED."""
    row = tl.arange(0, tiles.CHUNK)
    at = ptr + row.to(tl.int64)[:, None] * stride + column[None, :]
    inside = column[None, :] < columns
    if not TURNED:
        return tl.load(at, mask=(row < rows)[:, None] & inside, other=0.0).to(DTYPE)
    # with rows of the next sequence: TMA leaves out only what is outside of the tensor
    dout = tl.load(at, mask=(row < left)[:, None] & inside, other=0.0)
    return tl.where((row < rows)[None, :], tl.trans(dout).to(DTYPE), 0.0)


@triton.jit
def _dvalues(scores_at, k_out_at, dout, leaving, TURNED: tl.constexpr, PRECISION: tl.constexpr):
    """P^T dO + k_out D, transposed if TURNED: then D's product goes first, and dO is masked beside
    it; else that order would spill in fp32."""
    if TURNED:
        dvalues = tl.dot(leaving, tl.trans(tl.load(k_out_at)))
        return tl.dot(dout, tl.load(scores_at), dvalues)
    dvalues = tl.dot(tl.trans(tl.load(scores_at)), dout, input_precision=PRECISION)
    return tl.dot(tl.load(k_out_at), leaving, dvalues, input_precision=PRECISION)


@triton.jit(do_not_specialize=["tokens"])
def _reverse_scan_kernel(
    q_in_ptr, k_in_ptr, k_out_ptr, decay_ptr, inverse_ptr, scores_ptr, beta_ptr, dout_ptr,
    chunk_ptr, sequence_ptr, dfinal_ptr, dinitial_ptr, dstates_ptr, x_ptr, dout_batch, dout_token,
    dout_head, tokens, heads, keys: tl.constexpr, columns: tl.constexpr, key_stride: tl.constexpr,
    column_stride: tl.constexpr, TURNED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr, VALUES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """TURNED: as in kda_states. Sizes and strides of a state are constants, since offsets in it
    would take registers."""
    DTYPE: tl.constexpr = q_in_ptr.dtype.element_ty
    sequence, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    row, key = tl.arange(0, tiles.CHUNK), tl.arange(0, BLOCK)
    column = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    state_at = (sequence * heads + head) * (keys * columns)
    GIVEN: tl.constexpr = dfinal_ptr is not None
    (dstate,) = kda_states.load_state(
        dfinal_ptr + state_at if GIVEN else None, key, column, keys, columns, key_stride,
        column_stride, GIVEN, TURNED, 1, BLOCK,
    )  # fmt: skip
    operand_at = row[:, None] * BLOCK + key[None, :]
    square_at = row[:, None] * tiles.CHUNK + row[None, :]
    begin, count = tl.load(sequence_ptr + 2 * sequence), tl.load(sequence_ptr + 2 * sequence + 1)
    tl.assume(begin >= 0)
    leaving = dstate.to(DTYPE)
    for i in tl.range(0, count, num_stages=STAGES):
        chunk = begin + count - 1 - i
        first, rows = tl.load(chunk_ptr + 3 * chunk + 1), tl.load(chunk_ptr + 3 * chunk + 2)
        tl.assume(first >= 0)
        batch, token = (first // tokens).to(tl.int64), first % tokens
        tile = chunk.to(tl.int64) * heads + head
        operand, square = tile * (tiles.CHUNK * BLOCK), tile * (tiles.CHUNK * tiles.CHUNK)
        beta = tl.load(beta_ptr + tile * tiles.CHUNK + row)
        decay = tl.load(decay_ptr + tile * BLOCK + key)
        at = dout_ptr + batch * dout_batch + token.to(tl.int64) * dout_token
        dout = _load_dout(
            at + head.to(tl.int64) * dout_head, dout_token, rows, tokens - token, column, columns,
            DTYPE, TURNED,
        )  # fmt: skip
        kda_states.store_state(
            dstates_ptr + tile * (keys * columns), (leaving,), key, column, keys, columns, columns,
            1, TURNED, TURNED, 1, BLOCK,
        )  # fmt: skip
        # each operand is loaded where it is used: were they not pipelined, registers would not do
        dvalues = _dvalues(
            scores_ptr + square + square_at, k_out_ptr + operand + operand_at, dout, leaving,
            TURNED, PRECISION,
        ).to(DTYPE)  # fmt: skip
        inverse = tl.load(inverse_ptr + square + square_at)
        x = kda_states.times(tl.trans(inverse), dvalues, None, TURNED, PRECISION)
        place, stride = (first.to(tl.int64) * heads + head) * columns, heads * columns
        q_in = tl.load(q_in_ptr + operand + operand_at)
        dstate *= kda_states.down(decay, TURNED)
        dstate = kda_states.times(tl.trans(q_in), dout, dstate, TURNED, PRECISION)
        dread = (x * -kda_states.down(beta, TURNED)).to(DTYPE)
        k_in = tl.load(k_in_ptr + operand + operand_at)
        dstate = kda_states.times(tl.trans(k_in), dread, dstate, TURNED, PRECISION)
        leaving = dstate.to(DTYPE)
        kda_states.store_rows(x_ptr + place, x, rows, column, columns, stride, TURNED)
    if dinitial_ptr is not None:
        kda_states.store_state(
            dinitial_ptr + state_at, (dstate,), key, column, keys, columns, key_stride,
            column_stride, TURNED, False, 1, BLOCK,
        )  # fmt: skip


def reverse_scan(
    operands: Operands, dout: torch.Tensor, dfinal: torch.Tensor | None,
    dinitial: torch.Tensor | None, options: Options, chunks: Chunks, dstates: torch.Tensor,
    x: torch.Tensor,
) -> None:  # fmt: skip
    """Fills dstates [NC, H, K, V], D of every chunk, x [B, T, H, V], and dinitial unless None.

    dout: [B, T, H, V], last stride 1; dfinal, dinitial: contiguous, laid out as the states.
    """
    heads, columns, keys = x.shape[2], x.shape[3], dstates.shape[2]
    exact, programs = x.dtype == torch.float32, len(chunks.sequence) * heads
    tile = reverse_tile(programs, operands.q_in.shape[3], columns, x.dtype, x.device)
    if programs:
        _reverse_scan_kernel[(programs, triton.cdiv(columns, tile.columns))](
            *operands, dout, chunks.chunk, chunks.sequence, dfinal, dinitial, dstates, x,
            *dout.stride()[:3], x.shape[1], heads, keys, columns,
            *((1, keys) if options.value_major else (columns, 1)), TURNED=tile.turned,
            PRECISION="tf32x3" if exact else "tf32", BLOCK=operands.q_in.shape[3],
            VALUES=tile.columns, STAGES=tile.stages, num_warps=tile.warps,
        )  # fmt: skip


def reverse_tile(
    sequences: int, width: int, columns: int, dtype: torch.dtype, device: torch.device
) -> ScanTile:
    """As `scan_tile`, and as that where the state is held transposed."""
    tile = scan_tile(sequences, width, columns, dtype, device)
    if tile.turned:
        return tile
    wide = 16 if dtype == torch.float32 else 64 if sequences >= 64 else 32
    return ScanTile(min(wide, block(columns)), 8, width, 2, False)
