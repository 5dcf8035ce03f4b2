"""Vector add: the smallest complete kernel.

Each program adds one block of elements; the mask keeps the last, partial block in bounds.
Run: python examples/01_vector_add.py   (GPU if there is one, else the PTX emulator on the CPU)
"""

import torch

import minitriton as triton
import minitriton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    pid = tl.program_id(axis=0)
    offsets = pid * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x + y, mask=mask)


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Elementwise sum of two tensors of one shape and dtype."""
    out = torch.empty_like(x)
    n = out.numel()
    add_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK_SIZE"]),)](x, y, out, n, BLOCK_SIZE=1024)
    return out


def main() -> None:
    torch.manual_seed(0)
    for n in (1, 1000, 98_432):
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int32):
            x = (torch.randn(n, device=DEVICE) * 100).to(dtype)
            y = (torch.randn(n, device=DEVICE) * 100).to(dtype)
            assert torch.equal(add(x, y), x + y), (n, dtype)
    print(f"vector add on {DEVICE}: 4 dtypes, lengths 1, 1000 and 98432 equal torch to the bit")


if __name__ == "__main__":
    main()
