"""Low-memory dropout: the mask is recomputed from a seed instead of being stored.

Philox gives the same random numbers wherever (seed, offset) is the same, so that the backward
pass, or a check on another machine, can make the mask again.
Run: python examples/04_low_memory_dropout.py
"""

import torch

import minitriton as triton
import minitriton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def dropout_kernel(x_ptr, out_ptr, n, p, seed, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    keep = tl.rand(seed, offsets) > p
    tl.store(out_ptr + offsets, tl.where(keep, x / (1 - p), 0.0), mask=mask)


def dropout(x: torch.Tensor, p: float, seed: int) -> torch.Tensor:
    """Zeroes each element with probability `p`, scales the rest by 1 / (1 - p)."""
    out = torch.empty_like(x)
    dropout_kernel[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), p, seed, BLOCK=1024)
    return out


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(100_003, device=DEVICE)
    first, again, other = dropout(x, 0.3, 123), dropout(x, 0.3, 123), dropout(x, 0.3, 512)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    kept = first != 0
    torch.testing.assert_close(first[kept], x[kept] / 0.7)
    share = kept.float().mean().item()
    assert abs(share - 0.7) < 0.005, share
    print(f"dropout on {DEVICE}: repeatable by seed, {share:.4f} kept (0.7 asked for)")


if __name__ == "__main__":
    main()
