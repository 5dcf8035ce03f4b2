"""Operands that reach a dot through shared memory at one barrier, and their scratch used again."""

import pytest
import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.ir.conversion import MEETS_LATER


@triton.jit
def products(x_ptr, y_ptr, out_ptr, N: tl.constexpr, K: tl.constexpr):
    at = tl.arange(0, N)[:, None] * K + tl.arange(0, K)[None, :]
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    total = tl.zeros([N, N], tl.float32)
    for _ in tl.static_range(3):
        total += tl.dot(x, tl.trans(y))
        x, y = (x + y).to(tl.bfloat16), (x - y).to(tl.bfloat16)
    to = out_ptr + tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(to, total)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_both_operands_of_dots(device, target, monkeypatch):
    if device == "cpu":
        monkeypatch.setenv("MINITRITON_TARGET", target)
    x, y = (torch.randn(32, 64, device=device).bfloat16() for _ in range(2))
    out = torch.zeros(32, 32, device=device)
    compiled = products[(1,)](x, y, out, N=32, K=64, num_warps=4)
    expected, a, b = torch.zeros_like(out), x, y
    for _ in range(3):
        expected += a.float() @ b.float().T
        a, b = a + b, a - b
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-3)
    assert MEETS_LATER in str(compiled.asm["insert_barriers"])
