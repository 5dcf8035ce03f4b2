"""Softmax against fp64, as a torch operator, and refused arguments."""

import sys

import pytest
import torch

from minitriton.kernels import KernelArgumentError, softmax, softmax_reference
from minitriton.kernels.softmax import WHOLE, Tile

# relative rms: outputs, gradients
BOUNDS = {torch.float32: (1e-6, 2e-6), torch.bfloat16: (5e-3, 8e-3), torch.float16: (1e-3, 2e-3)}
FP32, BF16, FP16 = BOUNDS
SHAPES = [((1,), FP32), ((3, 1), BF16), ((5, 15), FP16), ((2, 3, 100), BF16), ((65, 64), FP32),
          ((7, 1000), FP16), ((2, 1025), FP32), ((3, 4096), BF16), ((2, 5000), FP32),
          ((2, 8000), FP16), ((2, 16384), BF16), ((2, 12000), FP32)]  # fmt: skip


def relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    return ((out.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def compare(x: torch.Tensor, grad: torch.Tensor) -> None:
    """Output and gradient against fp64 for leaves x."""
    exact = x.detach().double().requires_grad_()
    out, expected = softmax(x), softmax_reference(exact)
    assert out.dtype == x.dtype and out.shape == x.shape and out.is_contiguous()
    assert relative(out, expected) < BOUNDS[x.dtype][0]
    (dx,), (true,) = (torch.autograd.grad(y, t, grad.to(y.dtype)) for y, t in
                      ((out, x), (expected, exact)))  # fmt: skip
    # what is left of a difference of equal numbers, where a row has one element
    scale = max(true.norm().item(), 0.1 * grad.double().norm().item())
    assert dx.dtype == x.dtype and (dx.double() - true).norm().item() < BOUNDS[x.dtype][1] * scale


@pytest.mark.parametrize(("shape", "dtype"), SHAPES, ids=str)
def test_softmax(device, shape, dtype):
    x = (3 * torch.randn(shape, device=device)).to(dtype).requires_grad_()
    compare(x, torch.randn(shape, device=device).to(dtype))


@pytest.mark.parametrize("reads", [1, 2, 3])
@pytest.mark.parametrize("columns", [4096, 3000])
def test_rows_held_or_read_again(device, monkeypatch, reads, columns):
    module = sys.modules["minitriton.kernels.softmax"]
    monkeypatch.setattr(module, "_tile", lambda *_: Tile(2, 4096, 4, reads, 8))
    x = (3 * torch.randn(3, columns, device=device)).bfloat16().requires_grad_()
    compare(x, torch.randn(3, columns, device=device).bfloat16())


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_rows_in_blocks(device, dtype):
    shape = (2, 2 * WHOLE + 100)
    x = (3 * torch.randn(shape, device=device)).to(dtype).requires_grad_()
    compare(x, torch.randn(shape, device=device).to(dtype))
    rising = torch.linspace(-50, 50, shape[1], device=device).to(dtype)  # each block has a new peak
    compare(torch.stack([rising, rising.flip(0)]).requires_grad_(), torch.randn_like(x))


@pytest.mark.parametrize("columns", [40, 4096, WHOLE + 1])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_magnitudes_and_what_is_not_finite(device, columns, dtype):
    inf, nan = torch.inf, torch.nan
    x = torch.randn(8, columns, device=device).to(dtype)
    x[0, 3], x[1, 5], x[2], x[3, 7] = nan, inf, -inf, -inf
    x[4] = 3e38  # whose difference, but not whose product with log2(e), fp32 holds
    x[5], x[5, 9] = -3e38, 3e38
    x[6] = 1e4
    expected = torch.softmax(x.double(), -1)
    out = softmax(x)
    assert out.isnan().equal(expected.isnan()) and out[:3].isnan().all()
    torch.testing.assert_close(out[3:].double(), expected[3:], rtol=1e-2, atol=1e-7)


def test_views(device):
    t = torch.randn(40, 24, device=device).T.requires_grad_()
    compare(t, torch.randn(24, 40, device=device))
    wide = torch.randn(2, 5, 96, device=device)
    compare(wide[..., 13:77].detach().requires_grad_(), torch.randn(2, 5, 64, device=device))
    row = torch.randn(1, 33, device=device).expand(6, 33)  # one row seen six times
    assert relative(softmax(row), softmax_reference(row.double())) < BOUNDS[FP32][0]
    x = torch.randn(6, 33, device=device, requires_grad=True)
    softmax(x).sum().backward()  # the incoming gradient is one number seen everywhere
    torch.testing.assert_close(x.grad, torch.zeros_like(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)])
def test_empty(device, shape):
    x = torch.randn(shape, device=device, requires_grad=True)
    softmax(x).sum().backward()
    assert x.grad.shape == shape


def test_operators_are_sound(device):
    x = torch.randn(3, 20, device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.minitriton.softmax, (x,))
    torch.library.opcheck(torch.ops.minitriton.softmax, (torch.randn(20, 3, device=device).T,))


def test_torch_compile_without_graph_breaks(device):
    x = torch.randn(4, 50, device=device, requires_grad=True)
    compiled = torch.compile(lambda t: softmax(2 * t) * 3, fullgraph=True, backend="aot_eager")
    out = compiled(x)
    torch.testing.assert_close(out, softmax(2 * x) * 3)
    out.square().sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize(
    ("x", "match"),
    [
        (torch.zeros(2, 3).double(), "argument 'x': dtype torch.float64"),
        (torch.zeros(()), "argument 'x': a scalar"),
        (None, "argument 'x': expected a tensor, got NoneType"),
        (torch.empty(2**31, 1, device="meta"), "argument 'x': 2147483648 rows; at most"),
    ],
)
def test_refused_before_launch(x, match):
    with pytest.raises(KernelArgumentError, match=match):
        softmax(x)
