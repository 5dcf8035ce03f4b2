"""Rows read ahead by cp.async, every thread its own part: in the emulator, with all checks."""

import pytest
import torch

import minitriton as triton
from tests.passes import tile_kernels

lse_kernel = triton.jit(tile_kernels.log_sum_exp)
scaled_kernel = triton.jit(tile_kernels.scaled_rows)
sum_kernel = triton.jit(tile_kernels.block_sums)

pytestmark = pytest.mark.usefixtures("at_random")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], autouse=True)
def device(request, monkeypatch):
    """Once in the emulator, with all checks."""
    torch.manual_seed(97)
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    monkeypatch.setenv("MINITRITON_CHECK", "all")
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [16, 1024, 1040, 5008])
def test_masked_elements_hold_the_other_value(device, dtype, n):
    """-inf, in blocks that end anywhere."""
    x, y = torch.randn(5008, device=device).to(dtype), torch.zeros(1, device=device)
    compiled = lse_kernel[(1,)](x, y, n, STAGES=3, BLOCK=1024, num_warps=4)
    assert "cp.async" in compiled.asm["ptx"]
    expected = torch.logsumexp(x[:n].double(), 0)
    assert abs(y.item() - expected.item()) < 1e-5


@pytest.mark.parametrize("rows", [0, 2, 3, 7])
@pytest.mark.parametrize("stages", [2, 4])
def test_rows_that_are_stored_too(device, rows, stages):
    x = torch.randn(8, 1008, device=device).bfloat16()
    scale = torch.randint(1, 9, (8,), device=device).float()[:rows]  # no room past the last
    y, total = torch.zeros_like(x), torch.zeros(1024, device=device)
    compiled = scaled_kernel[(1,)](
        x, scale, y, total, rows, 1008, STAGES=stages, BLOCK=1024, num_warps=4
    )
    assert "cp.async" in compiled.asm["ptx"]
    assert torch.equal(y[:rows], (scale[:, None] * x[:rows]).bfloat16()) and not y[rows:].any()
    assert torch.allclose(total[:1008], x[:rows].float().sum(0), atol=1e-5)
    assert torch.equal(total[1008:], torch.full((16,), float(rows), device=device))


@pytest.mark.parametrize(("parts", "columns"), [(5, 64), (32, 48), (133, 64)])
def test_tiles_of_two_dimensions(device, parts, columns):
    x, y = torch.randn(parts, columns, device=device), torch.zeros(64, device=device)
    compiled = sum_kernel[(1,)](x, y, parts, columns, STAGES=2, R=32, C=64, num_warps=4)
    assert "cp.async" in compiled.asm["ptx"]
    assert torch.allclose(y[:columns], x.sum(0), atol=1e-4) and not y[columns:].any()
