"""KDA backward: gradients of all inputs of `chunk_kda`, in six launches.

The forward pass's `prepare` and `scan` run again and give operands, the state before every chunk,
V' and, for the L2 norm's sake, the output. `reverse_scan` (kda_backward_scan.py) gives the gradient
of every state; two kernels over all chunks at once (kda_backward_chunk.py) do the rest. No atomics:
equal inputs give equal bits. Scratch memory at K = V = 128 and bf16: 3.4 kB per token and head.
"""

from __future__ import annotations

import torch

import minitriton as triton
from minitriton.kernels.kda_backward_chunk import keys_kernel, values_kernel
from minitriton.kernels.kda_backward_scan import reverse_scan
from minitriton.kernels.kda_chunks import CHUNK, Chunks
from minitriton.kernels.kda_forward import Options, Results, block, prepare, scan

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
        q.new_empty(0) if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
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
    values, x = (torch.empty(v.shape, dtype=dtype, device=v.device) for _ in range(2))
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if l2 else None
    shape = (len(chunks.sequence), heads, columns, keys)
    final = q.new_empty(shape, dtype=torch.float32)
    operands = prepare(q, k, g, beta, a_log, dt_bias, options, chunks)
    scan(operands, v, beta, initial, options, chunks, Results(out, final, states, values))
    reverse_scan(
        operands, dout, beta, dfinal, None if initial is None else dinitial, options, chunks,
        dstates, x,
    )  # fmt: skip
    wide, summed = _tile(q, columns)
    blocks = triton.cdiv(keys, wide)
    ab = q.new_empty(count, heads, 2, CHUNK, CHUNK, dtype=dtype)
    norms = q.new_empty(*q.shape[:3], 4, dtype=torch.float32)
    sums = q.new_empty(count, heads, blocks + keys, dtype=torch.float32)
    fixed = {
        "L2": l2, "SIGMOID": options.beta_sigmoid, "PRECISION": "tf32x3" if exact else "tf32",
        "BK": wide, "BV": summed, "num_warps": WARPS,
    }  # fmt: skip
    if count * heads:
        values_kernel[(count * heads,)](
            q, k, v, beta, dout, v if out is None else out, x, values, chunks.chunk, dv, dbeta, ab,
            norms, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *beta.stride(),
            *dout.stride()[:3], q.shape[1], heads, keys, columns, **fixed,
        )  # fmt: skip
        keys_kernel[(count * heads * blocks,)](
            q, k, g, beta, g if a_log is None else a_log, g if dt_bias is None else dt_bias, dout,
            x, values, states, dstates, ab, norms, chunks.chunk, dq, dk, dg, sums, *q.stride()[:3],
            *k.stride()[:3], *g.stride()[:3], *beta.stride(), *dout.stride()[:3], q.shape[1], heads,
            keys, columns, options.scale, options.floor, GATE=options.gate,
            BIASED=dt_bias is not None, FINEST=1 if exact else options.finest, **fixed,
        )  # fmt: skip
    if a_log is not None:
        da_log.copy_(sums[..., :blocks].sum((0, 2)))
    if dt_bias is not None:
        dbias.copy_(sums[..., blocks:].sum(0))
    return made


def _tile(q: torch.Tensor, columns: int) -> tuple[int, int]:
    """Channels of K that a program of keys_kernel holds, columns of V summed at a time.

    So many that no architecture runs out of registers, which it does sooner in fp32, where rows are
    not aligned, and before sm_90.
    """
    if q.dtype == torch.float32 or q.shape[3] % 16 or columns % 16:
        return 16, 16
    new = q.is_cuda and torch.cuda.get_device_capability(q.device) >= (9, 0)
    return min(block(q.shape[3]), 32 if new else 16), min(block(columns), 64)
