"""The kernel that ARCHITECTURE.md follows through the compiler: softmax of each row, scaled."""

import minitriton as triton
import minitriton.language as tl


@triton.jit
def scaled_softmax(x_ptr, out_ptr, n, scale, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * n + tl.arange(0, BLOCK)
    mask = tl.arange(0, BLOCK) < n
    x = tl.load(x_ptr + offsets, mask=mask, other=-float("inf"))
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + offsets, e * (scale / tl.sum(e, axis=0)), mask=mask)
