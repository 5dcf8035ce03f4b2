"""KDA backward: gradients of all inputs of `chunk_kda`, in four launches.

The forward pass's `prepare` and `scan` run again and give operands, the state before every chunk
and V'; `reverse_scan` (kda_backward_scan.py) gives the gradient of every state and X; a kernel over
all chunks at once (kda_backward_chunk.py) does the rest. No atomics: equal inputs give equal bits.
Scratch memory per token and head, in bf16: 2 (3 K + 2 V + 128 + K V / 32) bytes, 1.9 kB where
K = V = 128.
"""

from __future__ import annotations

import torch

import minitriton as triton
from minitriton.kernels.kda_backward_chunk import chunk_kernel
from minitriton.kernels.kda_backward_scan import reverse_scan
from minitriton.kernels.kda_chunks import Chunks
from minitriton.kernels.kda_forward import Options, Results, block, prepare, scan

CHANNELS = 64  # of K that a program of the chunk kernel holds at a time
VALUES = 64
WARPS = 8


def backward(
    dout: torch.Tensor, dfinal: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor,
    v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, a_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None, initial: torch.Tensor | None, options: Options, chunks: Chunks,
) -> list[torch.Tensor]:  # fmt: skip
    """Gradients of q, k, v, g, beta, a_log, dt_bias, initial; empty ones for what is None.

    dout: [B, T, H, V] and dfinal, laid out as the states, are the gradients of the two results.
    q, k, v, g and dout have last stride 1, the others except beta are contiguous.
    """
    given = (q, k, v, g, beta, a_log, dt_bias, initial)
    made = [
        q.new_empty(0) if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for x in given
    ]
    heads, keys, columns = q.shape[2], q.shape[3], v.shape[3]
    count = len(chunks.chunk)
    dtype = torch.float32 if q.dtype == torch.float32 else torch.bfloat16
    states, dstates = (q.new_empty(count, heads, keys, columns, dtype=dtype) for _ in range(2))
    values, x = (q.new_empty(v.shape, dtype=dtype) for _ in range(2))
    shape = (len(chunks.sequence), heads, columns, keys)
    final = q.new_empty(shape, dtype=torch.float32)
    operands = prepare(q, k, g, beta, a_log, dt_bias, options, chunks)
    scan(operands, v, beta, initial, options, chunks, Results(None, final, states, values))
    dinitial = None if initial is None else made[7]
    reverse_scan(operands, dout, beta, dfinal, dinitial, options, chunks, dstates, x)
    sums = q.new_empty(count, heads, 1 + keys, dtype=torch.float32)
    if count * heads:
        exact = dtype == torch.float32
        chunk_kernel[(count * heads,)](
            q, k, v, g, beta, g if a_log is None else a_log, g if dt_bias is None else dt_bias,
            dout, x, values, states, dstates, chunks.chunk,
            *made[:5], sums, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *g.stride()[:3],
            *beta.stride(), *dout.stride()[:3], q.shape[1], heads, keys, columns, options.scale,
            options.floor, GATE=options.gate, BIASED=dt_bias is not None, L2=options.qk_l2norm,
            SIGMOID=options.beta_sigmoid, FINEST=options.finest,
            PRECISION="tf32x3" if exact else "tf32", BK=min(block(keys), CHANNELS),
            BV=min(block(columns), VALUES), num_warps=WARPS,
        )  # fmt: skip
    if a_log is not None:
        made[5].copy_(sums[..., 0].sum(0))
    if dt_bias is not None:
        made[6].copy_(sums[..., 1:].sum(0))
    return made
