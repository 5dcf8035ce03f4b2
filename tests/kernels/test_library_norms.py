"""RMS norm, plain and gated, against fp64, as torch operators, and refused arguments."""

import pytest
import torch

from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.norms import (
    gated_rms_norm,
    gated_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from minitriton.kernels.rows import RMS_NORM_TILES, NormTile

# relative rms: outputs, gradients of x and gate, gradients of a weight of that dtype
BOUNDS = {
    torch.float32: (2e-6, 5e-6, 5e-6),
    torch.bfloat16: (5e-3, 8e-3, 2e-2),
    torch.float16: (1e-3, 1e-3, 2e-3),
}
FP32, BF16, FP16 = BOUNDS
COLUMNS = [
    (1, FP32), (15, FP32), (128, FP32), (1000, FP32), (64, BF16), (128, BF16), (130, FP16),
    (15, FP16),
]  # fmt: skip
LEADING = [(1,), (3,), (65,), (2, 5)]


def relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    return ((out.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def inputs(shape, dtype, device, scale=1.0, weight_dtype=None):
    x, gate = torch.randn(shape, device=device) * scale, torch.randn(shape, device=device) * 2
    weight = 1 + torch.randn(shape[-1], device=device) / 2
    tensors = [x.to(dtype), gate.to(dtype), weight.to(weight_dtype or dtype)]
    return [t.requires_grad_() for t in tensors]


def compare(x, gate, weight, eps=1e-5, scale=1.0):
    """Output and gradients against fp64, within the bounds of the dtypes."""
    given = [t for t in (x, gate, weight) if t is not None]
    exact = [None if t is None else t.detach().double() for t in (x, gate, weight)]
    wanted = [t.requires_grad_() for t in exact if t is not None]
    out, expected = gated_rms_norm(x, gate, weight, eps), gated_rms_norm_reference(*exact, eps)
    grad = (torch.randn(x.shape, device=x.device) * scale).to(x.dtype)
    out.backward(grad)
    expected.backward(grad.double())
    assert out.dtype == x.dtype and out.shape == x.shape and out.is_contiguous()
    assert relative(out, expected) < BOUNDS[x.dtype][0]
    for mine, true in zip(given, wanted, strict=True):
        assert mine.grad.dtype == mine.dtype and mine.grad.shape == mine.shape
        error = (mine.grad.double() - true.grad).norm().item()
        # dx of a row of one element is what eps leaves of a difference of equal numbers
        floor = grad.double().norm().item() if x.shape[-1] == 1 and mine is x else 0.0
        bound = BOUNDS[x.dtype][1] if mine is not weight else BOUNDS[weight.dtype][2]
        assert error < bound * max(true.grad.norm().item(), floor), (mine is x, mine is gate)


@pytest.mark.parametrize(("columns", "dtype"), COLUMNS, ids=str)
def test_gated(device, columns, dtype):
    for leading in LEADING:
        compare(*inputs((*leading, columns), dtype, device))


@pytest.mark.parametrize(("columns", "dtype"), [(128, BF16), (15, FP16)], ids=str)
def test_absent_gate_or_weight_and_weight_in_fp32(device, columns, dtype):
    x, gate, weight = inputs((13, columns), dtype, device, weight_dtype=torch.float32)
    for arguments in ((x, gate, weight), (x, None, weight), (x, gate, None), (x, None, None)):
        compare(*(t if t is None else t.detach().requires_grad_() for t in arguments))
    expected = rms_norm_reference(x.double(), weight.double(), 1e-3)
    assert relative(rms_norm(x, weight, 1e-3), expected) < BOUNDS[dtype][0]


def test_one_dimension_and_the_longest_rows(device):
    compare(*inputs((33,), torch.float32, device))
    compare(*inputs((2, 8192), torch.bfloat16, device))
    compare(*inputs((3, 5000), torch.float32, device))


@pytest.mark.parametrize(
    "tile",
    [NormTile(1, 1024, 4), NormTile(2, 1024, 2, True), NormTile(1, 256, 2, True)],
    ids=str,
)
def test_tiles(device, tile, monkeypatch):
    """Rows held or read twice, in one block and in several, full and not."""
    monkeypatch.setitem(RMS_NORM_TILES, 1024, tile)
    for columns in (1024, 700):
        compare(*inputs((3, columns), torch.bfloat16, device))
    x, _, weight = inputs((3, 520), torch.float16, device)
    compare(x, None, weight)


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1e15])
def test_magnitudes(device, scale):
    compare(*inputs((9, 130), torch.float32, device, scale))
    # a row of zeros is divided by sqrt(eps) and nothing else
    x = torch.zeros(2, 40, device=device, requires_grad=True)
    rms_norm(x, None, 1e-4).sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 100.0))
    # squares that overflow give zeros, even where products with the gradient overflow, too
    x = torch.full((2, 40), 1e38, device=device, requires_grad=True)
    y = rms_norm(x, None, 1e-4)
    y.backward(torch.full_like(y, 1e3))
    assert not y.any() and not x.grad.any()


def test_saturated_gate(device):
    x, _, weight = inputs((1, 7), torch.float32, device)
    gate = torch.tensor([[-1e4, -90.0, -1e-4, 0.0, 1e-4, 90.0, 1e4]], device=device)
    compare(x, gate.requires_grad_(), weight)


def test_many_tiles_per_program_repeat_bit_by_bit(device, monkeypatch):
    monkeypatch.setattr("minitriton.kernels.norms.row_programs", lambda tiles, block: 3)
    tensors = inputs((7 * 16 + 5, 128), torch.float32, device)
    compare(*tensors)
    first = [t.grad.clone() for t in tensors]
    grad = torch.randn(tensors[0].shape, device=device)
    runs = [
        torch.autograd.grad(gated_rms_norm(*tensors), tensors, grad, retain_graph=True)
        for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert not torch.equal(first[2], runs[0][2])


def test_views(device):
    both = torch.randn(9, 2 * 48, device=device)
    x, gate = both.chunk(2, dim=-1)
    _, _, weight = inputs((48,), torch.float32, device)
    compare(x.requires_grad_(), gate.requires_grad_(), weight)
    t = torch.randn(40, 24, device=device).T.requires_grad_()
    compare(
        t, t.detach().clone().requires_grad_(), torch.randn(80, device=device)[::2].requires_grad_()
    )
    row = torch.randn(1, 33, device=device).expand(6, 33)  # one row seen six times
    expected = gated_rms_norm_reference(row.double(), row.double())
    assert relative(gated_rms_norm(row, row), expected) < 2e-6
    wide = torch.randn(6, 33, device=device, requires_grad=True)
    rms_norm(wide).sum().backward()  # the incoming gradient is one number seen everywhere
    exact = wide.detach().double().requires_grad_()
    rms_norm_reference(exact).sum().backward()
    assert relative(wide.grad, exact.grad) < 5e-6


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_heads_of_a_projection_in_place(device, dtype, monkeypatch):
    """Rows at two distances are views: nothing is copied, except what fits no such pattern."""
    contiguous, copied = torch.Tensor.contiguous, []
    monkeypatch.setattr(
        torch.Tensor, "contiguous", lambda t: copied.append(t.shape) or contiguous(t)
    )
    fused = torch.randn(2, 7, 3 * 64 + 2 * 48, device=device).to(dtype)
    x = fused[..., : 3 * 64].view(2, 7, 3, 64)[..., :48]
    gate = fused[..., 3 * 64 :].view(2, 7, 2, 48).repeat(1, 1, 2, 1)[:, :, :3]
    weight = (1 + torch.randn(48, device=device) / 2).to(dtype)
    for tensors in ((x, gate, weight), (x[:1, 1:4], None, None), (x, x, weight)):
        compare(*(t if t is None else t.detach().requires_grad_() for t in tensors))
    assert not any(len(shape) > 1 for shape in copied)
    compare(x.detach().requires_grad_(), gate.detach()[..., ::2].repeat_interleave(2, -1)
            .transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(), None)  # fmt: skip
    assert copied


def test_frozen_weight(device):
    x, gate, weight = inputs((5, 40), FP32, device)
    out = gated_rms_norm(x, gate, weight.detach())
    ours = torch.autograd.grad(out.square().sum(), (x, gate))
    expected = gated_rms_norm_reference(x, gate, weight.detach())
    theirs = torch.autograd.grad(expected.square().sum(), (x, gate))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)])
def test_empty(device, shape):
    x, gate, weight = inputs(shape, torch.float32, device)
    gated_rms_norm(x, gate, weight).sum().backward()
    assert x.grad.shape == shape and gate.grad.shape == shape
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_operators_are_sound(device):
    x, gate, weight = inputs((3, 20), torch.float32, device)
    operator = torch.ops.minitriton.gated_rms_norm
    torch.library.opcheck(operator, (x, gate, weight, 1e-5))
    permuted = torch.randn(20, 3, device=device).T.requires_grad_()
    torch.library.opcheck(operator, (permuted, None, weight.detach(), 1e-5))


def test_torch_compile_without_graph_breaks(device):
    x, gate, weight = inputs((4, 50), torch.float32, device)

    def block(x, gate, weight):
        return gated_rms_norm(x * 2, gate, weight) + rms_norm(x)

    out = torch.compile(block, fullgraph=True, backend="aot_eager")(x, gate, weight)
    torch.testing.assert_close(out, block(x, gate, weight))
    out.sum().backward()
    assert x.grad is not None and gate.grad is not None and weight.grad is not None


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda x, g, w: (x.double(), g, w), "argument 'x': dtype torch.float64"),
        (lambda x, g, w: (x[0, 0], g, w), "argument 'x': a scalar"),
        (lambda x, g, w: (None, g, w), "argument 'x': expected a tensor, got NoneType"),
        (lambda x, g, w: (x.new_empty(1, 8193), g, w), "argument 'x': 1 rows of 8193.* 8192"),
        (lambda x, g, w: (x, g[:, :3], w), r"argument 'gate': shape \(2, 3\) differs.*\(2, 8\)"),
        (lambda x, g, w: (x, g.bfloat16(), w), "argument 'gate': dtype torch.bfloat16 differs"),
        (lambda x, g, w: (x, g, w[1:]), r"argument 'weight': shape \(7,\); it must be \(8,\)"),
        (lambda x, g, w: (x, g, x), r"argument 'weight': shape \(2, 8\); it must be"),
        (lambda x, g, w: (x, g, w.half()), "argument 'weight': dtype torch.float16; it must be"),
        (lambda x, g, w: (x, g, w.to("meta")), "argument 'weight': device meta differs"),
        (lambda x, g, w: (x, g, 1.0), "argument 'weight': expected a tensor, got float"),
        (lambda x, g, w: (x, g, w, 0.0), "argument 'eps': must be a positive number, got 0.0"),
    ],
)
def test_refused_before_launch(device, change, match):
    x, gate = torch.randn(2, 8, device=device), torch.randn(2, 8, device=device)
    with pytest.raises(KernelArgumentError, match=match):
        gated_rms_norm(*change(x, gate, torch.randn(8, device=device)))
