"""KDA backward: gradients of all inputs of `chunk_kda`, in ten launches or less.

The forward pass's `prepare` and `scan` run again and give operands, the state before every chunk,
V' and, for the L2 norm's sake, the output. `reverse_scan` (kda_backward_scan.py) gives the gradient
of every state. The rest is done for all chunks at once: products (kda_backward_chunk.py), and from
them the gradients of q, k and the gate (kda_backward_pairs.py for gates with a bound of e^-5 in 16
bits, kda_backward_levels.py for others). No atomics: equal inputs give equal bits. Scratch memory
at K = V = 128 and bf16: 4.2 kB per token and head, 4.9 kB for gates without that bound.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

import minitriton as triton
from minitriton.kernels.devices import since_hopper
from minitriton.kernels.kda_backward_chunk import states_kernel, values_kernel
from minitriton.kernels.kda_backward_levels import keys_kernel
from minitriton.kernels.kda_backward_pairs import bounded_keys_kernel
from minitriton.kernels.kda_backward_scan import reverse_scan
from minitriton.kernels.kda_chunks import CHUNK, Chunks
from minitriton.kernels.kda_forward import (
    FARTHEST,
    Operands,
    Options,
    Results,
    block,
    prepare,
    scan,
)
from minitriton.kernels.rows import new_like

WARPS = 8
SMALLEST_BETA = 2.0**-60


def backward(
    dout: torch.Tensor, dfinal: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor,
    v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, a_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None, initial: torch.Tensor | None, options: Options, chunks: Chunks,
) -> list[torch.Tensor]:  # fmt: skip
    """Gradients of q, k, v, g, beta, a_log, dt_bias, initial; empty ones for what is None.

    dout: [B, T, H, V] and dfinal, laid out as the states, are the gradients of the two results.
    q, k, v, g and dout have last stride 1, the others except beta are contiguous.
    """
    made = [
        q.new_empty(0) if x is None else new_like(x)
        for x in (q, k, v, g, beta, a_log, dt_bias, initial)
    ]
    dq, dk, dv, dg, dbeta, da_log, dbias, dinitial = made
    if not options.beta_sigmoid:  # the gradient of beta is found from V', which beta scales
        least = max(SMALLEST_BETA, torch.finfo(beta.dtype).tiny)
        beta = beta.masked_fill(beta == 0, least)
    count, heads, keys, columns = len(chunks.chunk), q.shape[2], q.shape[3], v.shape[3]
    exact, l2 = q.dtype == torch.float32, options.qk_l2norm
    dtype = torch.float32 if exact else torch.bfloat16
    states, dstates = (q.new_empty(count, heads, keys, columns, dtype=dtype) for _ in range(2))
    values, x = (new_like(v, dtype) for _ in range(2))
    out = new_like(v) if l2 else None
    shape = (len(chunks.sequence), heads, columns, keys)
    final = q.new_empty(shape, dtype=torch.float32)
    operands = prepare(q, k, g, beta, a_log, dt_bias, options, chunks)
    scan(operands, v, initial, options, chunks, Results(out, final, states, values))
    reverse_scan(
        operands, dout, dfinal, None if initial is None else dinitial, options, chunks, dstates, x
    )
    ab = q.new_empty(count, heads, 2, CHUNK, CHUNK, dtype=dtype)
    norms = q.new_empty(*q.shape[:3], 4, dtype=torch.float32)
    if count * heads:
        wide, summed = _tile(q, columns)
        values_kernel[(count * heads,)](
            q, k, v, operands.beta, dout, v if out is None else out, x, values, chunks.chunk, dv,
            dbeta, ab, norms, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            *dout.stride()[:3], q.shape[1], heads, keys, columns, L2=l2,
            SIGMOID=options.beta_sigmoid, PRECISION="tf32x3" if exact else "tf32", BK=wide,
            BV=summed, num_warps=4 if since_hopper(q) and wide == 64 else WARPS,
        )  # fmt: skip
    bounded = options.finest == 16 and not exact
    through = through_states(
        operands, q, dout, x, values, states, dstates, chunks, exact or bounded
    )
    sums = keys_gradients(
        through, q, k, g, a_log, dt_bias, options, chunks, ab, norms, dq, dk, dg, bounded
    )
    blocks = sums.shape[2] - keys
    if a_log is not None:
        da_log.copy_(sums[..., :blocks].sum((0, 2)))
    if dt_bias is not None:
        dbias.copy_(sums[..., blocks:].sum(0))
    return made


class Through(NamedTuple):
    """Gradients that pass through the states, BK = `block(K)` channels, before their decays."""

    read: torch.Tensor  # dO S^T, [NC, H, C / 16, BK, 16], as the next two
    known: torch.Tensor  # beta X S^T
    written: torch.Tensor  # V' D^T
    kept: torch.Tensor  # [NC, H, BK] fp32, of G_last in the decay of the whole state


def through_states(
    operands: Operands, q: torch.Tensor, dout: torch.Tensor, x: torch.Tensor,
    values: torch.Tensor, states: torch.Tensor, dstates: torch.Tensor, chunks: Chunks,
    replace: bool,
) -> Through:  # fmt: skip
    """The products with states; they replace q_in, k_in and k_out, or are new and in fp32."""
    count, heads, keys, columns = states.shape
    wide, summed = _tile(q, columns)
    read, known, written, kept = operands[:4]
    if not replace:
        read, known, written = (
            torch.empty_like(t, dtype=torch.float32) for t in (read, known, written)
        )
    made = Through(read, known, written, kept)
    if count * heads:
        states_kernel[(count * heads * triton.cdiv(keys, wide),)](
            dout, x, values, operands.beta, states, dstates, chunks.chunk, *made,
            *dout.stride()[:3], dout.shape[1], heads, keys, columns,
            PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32",
            BLOCK=operands.q_in.shape[3], BK=wide, BV=summed, STAGES=2, num_warps=4,
        )  # fmt: skip
    return made


def keys_gradients(
    through: Through, q: torch.Tensor, k: torch.Tensor, g: torch.Tensor,
    a_log: torch.Tensor | None, dt_bias: torch.Tensor | None, options: Options, chunks: Chunks,
    ab: torch.Tensor, norms: torch.Tensor, dq: torch.Tensor, dk: torch.Tensor, dg: torch.Tensor,
    bounded: bool,
) -> torch.Tensor:  # fmt: skip
    """Fills dq, dk, dg. Returns what the gate's parameters sum, [NC, H, blocks of K plus K]."""
    count, heads, width = through.kept.shape
    keys, exact = q.shape[3], q.dtype == torch.float32
    tile = bounded_tile(q, width)
    wide = tile.channels if bounded else 32 if since_hopper(q) and not exact else 16
    blocks = triton.cdiv(keys, wide)
    sums = q.new_empty(count, heads, blocks + keys, dtype=torch.float32)
    if not count * heads:
        return sums
    if bounded and (not q.stride() == k.stride() == g.stride() or q.stride(1) >= FARTHEST):
        q, k, g = q.contiguous(), k.contiguous(), g.contiguous()
    inputs = (q, k, g, g if a_log is None else a_log, g if dt_bias is None else dt_bias)
    inputs += (*through, ab, norms)
    outputs = (chunks.chunk, dq, dk, dg, sums)
    fixed = {"BIASED": dt_bias is not None, "L2": options.qk_l2norm, "BLOCK": width, "BK": wide}
    if bounded:
        scratch = through.read.new_empty(count, heads, 3, CHUNK, width)
        anchors = q.new_empty(count, heads, CHUNK // 16, width, dtype=torch.float32)
        bounded_keys_kernel[(count * heads * blocks,)](
            *inputs, scratch, anchors, *outputs, q.stride(0), q.stride(2), q.shape[1],
            options.scale, options.floor, heads, keys, q.stride(1), **fixed, num_warps=tile.warps,
            maxnreg=tile.registers,
        )  # fmt: skip
    else:
        keys_kernel[(count * heads * blocks,)](
            *inputs, *outputs, *q.stride()[:3], *k.stride()[:3], *g.stride()[:3], q.shape[1],
            heads, keys, options.scale, options.floor, GATE=options.gate,
            PRECISION="tf32x3" if exact else "tf32", **fixed, num_warps=WARPS,
        )  # fmt: skip
    return sums


def _tile(q: torch.Tensor, columns: int) -> tuple[int, int]:
    """Channels of K that a program of states_kernel holds, columns of V summed at a time.

    So many that no architecture runs out of registers, which it does sooner in fp32, where rows are
    not aligned, and before sm_90.
    """
    if q.dtype == torch.float32 or q.shape[3] % 16 or columns % 16:
        return 16, 16
    return min(block(q.shape[3]), 64 if since_hopper(q) else 32), min(block(columns), 64)


class BoundedTile(NamedTuple):
    """How a program of bounded_keys_kernel runs."""

    channels: int  # of K
    warps: int  # one for 32 channels needs no barriers, more need fewer registers
    registers: int | None  # of a thread, at most


def bounded_tile(q: torch.Tensor, width: int) -> BoundedTile:
    """For K padded to `width`; before sm_90 registers would spill with less than 4 warps."""
    return BoundedTile(32, 1, 168) if since_hopper(q) else BoundedTile(min(width, 64), 4, None)
