"""The linear layer with SiTU-GLU against fp64, as a torch operator, and refused arguments."""

import pytest
import torch

from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.situ_gemm import situ_glu_linear, situ_glu_linear_reference

# relative rms: output and dx, dw13
BOUNDS = {
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (5e-3, 8e-3),
    torch.float16: (1e-3, 1e-3),
}


def relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    return ((out.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def inputs(shape, ff, dtype, device):
    x, w13 = torch.randn(shape), torch.randn(2 * ff, shape[-1]) * 2 / shape[-1] ** 0.5
    return [t.to(device, dtype).requires_grad_() for t in (x, w13)]


def check(tensors, bounds, **betas):
    """Output and gradients of one call within bounds of fp64."""
    exact = [x.detach().double().requires_grad_() for x in tensors]
    out, expected = situ_glu_linear(*tensors, **betas), situ_glu_linear_reference(*exact, **betas)
    grad = torch.randn(out.shape, device=out.device).to(out.dtype)
    ours = torch.autograd.grad(out, tensors, grad)
    theirs = torch.autograd.grad(expected, exact, grad.double())
    assert out.dtype == tensors[0].dtype and out.is_contiguous() and out.shape == expected.shape
    assert relative(out, expected) < bounds[0]
    for x, ours_, theirs_ in zip(tensors, ours, theirs, strict=True):
        assert ours_.dtype == x.dtype and ours_.shape == x.shape
        assert relative(ours_, theirs_) < bounds[1]


@pytest.mark.parametrize(
    ("shape", "ff", "dtype"),
    [
        ((5, 64), 80, torch.bfloat16),
        ((2, 30, 64), 80, torch.bfloat16),
        ((131, 64), 80, torch.bfloat16),
        ((37, 33), 17, torch.float32),
        ((3, 2, 48), 32, torch.float16),
    ],
    ids=str,
)
def test_layer(device, shape, ff, dtype):
    check(inputs(shape, ff, dtype, device), BOUNDS[dtype])


def test_other_betas(device):
    check(inputs((9, 32), 16, torch.float32, device), BOUNDS[torch.float32], beta1=1.0, beta2=None)


def test_large_values_saturate(device):
    x, w13 = inputs((4, 32), 16, torch.float32, device)
    out = situ_glu_linear(1000 * x, w13)
    assert out.isfinite().all() and out.abs().max() <= 100 and out.abs().max() > 90


def test_strided_operands(device):
    x = torch.randn(3, 64, 5, device=device).transpose(1, 2)[..., 16:48].requires_grad_()
    w13 = torch.randn(32, 48, device=device).T.requires_grad_()
    check([x, w13], BOUNDS[torch.float32])
    x, w13 = inputs((9, 32), 16, torch.float32, device)
    exact = [t.detach().double().requires_grad_() for t in (x, w13)]
    situ_glu_linear(x, w13).sum().backward()  # the incoming gradient is one number seen everywhere
    situ_glu_linear_reference(*exact).sum().backward()
    assert relative(x.grad, exact[0].grad) < 1e-5 and relative(w13.grad, exact[1].grad) < 1e-5


def test_gradients_of_one(device):
    x, w13 = inputs((9, 32), 16, torch.float32, device)
    both = torch.autograd.grad(situ_glu_linear(x, w13).square().sum(), (x, w13))
    one = torch.autograd.grad(situ_glu_linear(x, w13.detach()).square().sum(), x)
    other = torch.autograd.grad(situ_glu_linear(x.detach(), w13).square().sum(), w13)
    assert torch.equal(one[0], both[0]) and torch.equal(other[0], both[1])
    with torch.no_grad():
        assert torch.equal(situ_glu_linear(x, w13), situ_glu_linear(x.detach(), w13).detach())


def test_no_rows(device):
    x, w13 = inputs((2, 0, 32), 16, torch.float32, device)
    out = situ_glu_linear(x, w13)
    out.sum().backward()
    assert out.shape == (2, 0, 16) and x.grad.shape == x.shape and not w13.grad.any()


def test_results_do_not_vary(device):
    tensors = inputs((20, 64), 80, torch.bfloat16, device)
    outs = [situ_glu_linear(*tensors) for _ in range(2)]
    grads = [torch.autograd.grad(out.float().square().sum(), tensors) for out in outs]
    assert torch.equal(*outs) and all(map(torch.equal, *grads))


def test_operator_is_sound(device):
    tensors = inputs((3, 3, 32), 16, torch.float32, device)
    torch.library.opcheck(torch.ops.minitriton.situ_glu_linear, (*tensors, 4.0, None, True))


def test_torch_compile_without_graph_breaks(device):
    tensors = inputs((9, 32), 16, torch.float32, device)

    def layer(x, w13):
        return situ_glu_linear(x * 2, w13) + 1

    out = torch.compile(layer, fullgraph=True, backend="aot_eager")(*tensors)
    expected = layer(*tensors)
    torch.testing.assert_close(out, expected)
    ours = torch.autograd.grad(out.square().sum(), tensors)
    torch.testing.assert_close(ours, torch.autograd.grad(expected.square().sum(), tensors))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda x, w: (x.double(), w), "argument 'x': dtype torch.float64"),
        (lambda x, w: (x, [w]), "argument 'w13': expected a tensor, got list"),
        (lambda x, w: (x, w[1:]), r"argument 'w13': shape \(31, 32\); .*\(2 ff, 32\)"),
        (lambda x, w: (x, w[:, 1:]), r"argument 'w13': shape \(32, 31\)"),
        (lambda x, w: (x, w[:0]), r"argument 'w13': shape \(0, 32\)"),
        (lambda x, w: (x, w[None]), r"argument 'w13': shape \(1, 32, 32\)"),
        (lambda x, w: (x, w.half()), "argument 'w13': dtype torch.float16 differs from that of"),
        (lambda x, w: (x, w.to("meta")), "argument 'w13': device meta differs from that of 'x'"),
        (lambda x, w: (x, w, -1.0), "argument 'beta1': must be a positive number"),
        (lambda x, w: (x, w, 4.0, 0), "argument 'beta2': must be a positive number"),
    ],
)
def test_refused_before_launch(device, change, match):
    tensors = [x.detach() for x in inputs((4, 32), 16, torch.float32, device)]
    with pytest.raises(KernelArgumentError, match=match):
        situ_glu_linear(*change(*tensors))
