"""Flash attention, forward: softmax(q k^T) v without ever storing the score matrix.

A program owns BLOCK_M queries of one head and walks over keys, keeping a running maximum and sum
per row. Causal programs split the walk: full blocks first, then the masked diagonal.
Run: python examples/06_flash_attention.py
"""

import torch

import minitriton as triton
import minitriton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def walk(
    acc, l_i, m_i, q, k_ptrs, v_ptrs, stride_k, stride_v, lo, hi, offs_m, n_ctx, scale,
    BLOCK_N: tl.constexpr, CAUSAL_MASK: tl.constexpr,
):  # fmt: skip
    offs_n = tl.arange(0, BLOCK_N)
    for start in range(lo, hi, BLOCK_N):
        inside = (start + offs_n) < n_ctx
        k = tl.load(k_ptrs + start * stride_k, mask=inside[None, :], other=0.0)
        scores = tl.dot(q, k) * scale
        keep = inside[None, :]
        if CAUSAL_MASK:
            keep = keep & (offs_m[:, None] >= (start + offs_n)[None, :])
        scores = tl.where(keep, scores, -1.0e30)
        m_new = tl.maximum(m_i, tl.max(scores, 1))
        p = tl.exp2(scores - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        v = tl.load(v_ptrs + start * stride_v, mask=inside[:, None], other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        m_i = m_new
    return acc, l_i, m_i


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, sm_scale, stride_head, stride_row, n_ctx,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    start_m = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64) * stride_head
    offs_m = start_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD_DIM)
    rows = offs_m[:, None] < n_ctx
    q = tl.load(q_ptr + head + offs_m[:, None] * stride_row + offs_d[None, :], mask=rows, other=0.0)
    k_ptrs = k_ptr + head + offs_n[None, :] * stride_row + offs_d[:, None]
    v_ptrs = v_ptr + head + offs_n[:, None] * stride_row + offs_d[None, :]
    m_i = tl.full((BLOCK_M,), -1.0e30, tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    scale = sm_scale * 1.4426950408889634  # base-2 exponentials inside
    diagonal = start_m * BLOCK_M
    full_end = diagonal if CAUSAL else n_ctx
    acc, l_i, m_i = walk(
        acc, l_i, m_i, q, k_ptrs, v_ptrs, stride_row, stride_row, 0, full_end, offs_m, n_ctx,
        scale, BLOCK_N, False,
    )  # fmt: skip
    if CAUSAL:
        end = min(diagonal + BLOCK_M, n_ctx)
        acc, l_i, m_i = walk(
            acc, l_i, m_i, q, k_ptrs, v_ptrs, stride_row, stride_row, diagonal, end, offs_m, n_ctx,
            scale, BLOCK_N, True,
        )  # fmt: skip
    acc = acc / l_i[:, None]
    o_ptrs = o_ptr + head + offs_m[:, None] * stride_row + offs_d[None, :]
    tl.store(o_ptrs, acc.to(o_ptr.dtype.element_ty), mask=rows)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """q, k, v: contiguous [batch, heads, tokens, head_dim] in fp16 or bf16; result likewise."""
    batch, heads, n_ctx, head_dim = q.shape
    out = torch.empty_like(q)
    attention_kernel[(triton.cdiv(n_ctx, 64), batch * heads)](
        q, k, v, out, head_dim**-0.5, q.stride(1), q.stride(2), n_ctx,
        BLOCK_M=64, BLOCK_N=32, HEAD_DIM=head_dim, CAUSAL=causal, num_warps=4,
    )  # fmt: skip
    return out


def main() -> None:
    torch.manual_seed(0)
    worst = 0.0
    for causal in (False, True):
        for n_ctx in (64, 200):
            q, k, v = (torch.randn(1, 2, n_ctx, 64, device=DEVICE).half() for _ in range(3))
            reference = torch.nn.functional.scaled_dot_product_attention(
                q.double(), k.double(), v.double(), is_causal=causal
            )
            out = attention(q, k, v, causal).double()
            worst = max(worst, ((out - reference).norm() / reference.norm()).item())
    assert worst < 2e-3, worst
    print(f"attention on {DEVICE}: causal and not, 64 and 200 tokens, within {worst:.1e} of fp64")


if __name__ == "__main__":
    main()
