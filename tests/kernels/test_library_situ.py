"""SiTU and SiTU-GLU against fp64, as torch operators, and refused arguments."""

import pytest
import torch

from minitriton.kernels import row_blocks, situ, situ_glu, situ_glu_reference, situ_reference
from minitriton.kernels.checks import KernelArgumentError

# relative rms: outputs, gradients
BOUNDS = {torch.float32: (2e-6, 2e-6), torch.bfloat16: (5e-3, 8e-3), torch.float16: (1e-3, 1e-3)}
SHAPES = [(1,), (15,), (3, 17), (2, 5, 130), (7, 1000), (2, 1025), (64, 1)]
CASES = [
    *((shape, (4.0, 25.0), torch.bfloat16) for shape in SHAPES),
    *((shape, (1.0, None), torch.float32) for shape in SHAPES[::2]),
    *((shape, (0.5, 2.0), torch.float16) for shape in SHAPES[1::2]),
]


def relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    return ((out.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def pair(shape, dtype, device, scale=3.0):
    tensors = [(torch.randn(shape, device=device) * scale).to(dtype) for _ in range(2)]
    return [t.requires_grad_() for t in tensors]


@pytest.mark.parametrize(("shape", "betas", "dtype"), CASES, ids=str)
def test_situ_glu(device, shape, betas, dtype):
    gate, up = pair(shape, dtype, device)
    exact = [t.detach().double().requires_grad_() for t in (gate, up)]
    out, expected = situ_glu(gate, up, *betas), situ_glu_reference(*exact, *betas)
    grad = torch.randn(shape, device=device).to(dtype)
    out.backward(grad)
    expected.backward(grad.double())
    assert out.dtype == dtype and out.is_contiguous()
    assert relative(out, expected) < BOUNDS[dtype][0]
    assert relative(gate.grad, exact[0].grad) < BOUNDS[dtype][1]
    assert relative(up.grad, exact[1].grad) < BOUNDS[dtype][1]


@pytest.mark.parametrize(
    ("dtype", "beta"), [(torch.float32, 1.0), (torch.bfloat16, 4.0), (torch.float16, 4.0)], ids=str
)
def test_situ(device, dtype, beta):
    (x, _) = pair((5, 130), dtype, device)
    exact = x.detach().double().requires_grad_()
    out, expected = situ(x, beta), situ_reference(exact, beta)
    grad = torch.randn(5, 130, device=device).to(dtype)
    out.backward(grad)
    expected.backward(grad.double())
    assert relative(out, expected) < BOUNDS[dtype][0]
    assert relative(x.grad, exact.grad) < BOUNDS[dtype][1]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 5, 1300), torch.bfloat16), ((7,), torch.float32), ((3, 17), torch.float16)],
    ids=str,
)
def test_routing_weights(device, shape, dtype):
    gate, up = pair(shape, dtype, device)
    weight = torch.rand(shape[:-1], device=device).requires_grad_()
    exact = [t.detach().double().requires_grad_() for t in (gate, up, weight)]
    out = situ_glu(gate, up, weight=weight)
    expected = situ_glu_reference(*exact[:2], weight=exact[2])
    grad = torch.randn(shape, device=device).to(dtype)
    runs = [torch.autograd.grad(out, (gate, up, weight), grad, retain_graph=True) for _ in "ab"]
    wanted = torch.autograd.grad(expected, exact, grad.double())
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert out.dtype == dtype and relative(out, expected) < BOUNDS[dtype][0]
    for mine, true, bound in zip(runs[0], wanted, (*[BOUNDS[dtype][1]] * 2, 1e-5), strict=True):
        assert mine.shape == true.shape and relative(mine, true) < bound


def test_routing_weights_of_strided_rows(device):
    both = torch.randn(6, 2 * 48, device=device)
    gate, up = both.chunk(2, dim=-1)
    weight = torch.rand(6, 3, device=device)[:, 1]
    expected = situ_glu_reference(gate.double(), up.double(), 4.0, None, weight.double())
    assert relative(situ_glu(gate, up, 4.0, None, weight), expected) < 2e-6


def test_more_rows_than_a_grid_has(device, monkeypatch):
    """Its third dimension takes them; the last programs may find no row."""
    monkeypatch.setattr(row_blocks, "MOST", 4)
    both = torch.randn(2, 5, 2 * 24, device=device, requires_grad=True)
    weight = torch.rand(2, 5, device=device, requires_grad=True)
    exact = [t.detach().double().requires_grad_() for t in (both, weight)]
    for scale in (None, weight):
        gate, up = both.chunk(2, dim=-1)
        out = situ_glu(gate, up, weight=scale)
        e_gate, e_up = exact[0].chunk(2, dim=-1)
        expected = situ_glu_reference(e_gate, e_up, weight=None if scale is None else exact[1])
        assert relative(out, expected) < 2e-6
        given = [both] if scale is None else [both, weight]
        wanted = torch.autograd.grad(expected.sum(), exact[: len(given)])
        for mine, true in zip(torch.autograd.grad(out.sum(), given), wanted, strict=True):
            assert relative(mine, true) < 1e-5


def test_extreme_inputs_stay_bounded(device):
    gate = torch.tensor([-1e4, -90.0, -1e-4, 0.0, 1e-4, 90.0, 1e4], device=device)
    out = situ_glu(gate, gate.flip(0))
    expected = situ_glu_reference(gate.double(), gate.flip(0).double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-12)
    assert out.abs().max() <= 100


def test_halves_of_one_tensor_and_transposed_views(device):
    both = torch.randn(9, 2 * 48, device=device)
    gate, up = both.chunk(2, dim=-1)
    assert relative(situ_glu(gate, up), situ_glu_reference(gate.double(), up.double())) < 2e-6
    t = torch.randn(40, 24, device=device).T
    assert relative(situ_glu(t, t), situ_glu_reference(t.double(), t.double())) < 2e-6
    wide = torch.randn(6, 33, device=device, requires_grad=True)
    situ(wide).sum().backward()  # the incoming gradient is one number seen everywhere
    exact = wide.detach().double().requires_grad_()
    situ_reference(exact).sum().backward()
    assert relative(wide.grad, exact.grad) < 2e-6


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)])
def test_empty(device, shape):
    gate, up = pair(shape, torch.float32, device)
    weight = torch.ones(shape[:-1], device=device, requires_grad=True)
    (situ_glu(gate, up) + situ_glu(gate, up, weight=weight)).sum().backward()
    assert gate.grad.shape == shape and up.grad.shape == shape
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_operators_are_sound(device):
    gate, up = pair((3, 20), torch.float32, device)
    torch.library.opcheck(torch.ops.minitriton.situ, (gate, 4.0))
    weight = torch.rand(3, device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.minitriton.situ_glu, (gate, up, weight, 4.0, 25.0))
    permuted = torch.randn(20, 3, device=device).T.requires_grad_()
    torch.library.opcheck(torch.ops.minitriton.situ_glu, (permuted, up, None, 4.0, None))


def test_torch_compile_without_graph_breaks(device):
    gate, up = pair((4, 50), torch.float32, device)
    compiled = torch.compile(
        lambda g, u: situ_glu(g * 2, u) + situ(g), fullgraph=True, backend="aot_eager"
    )
    out = compiled(gate, up)
    torch.testing.assert_close(out, situ_glu(gate * 2, up) + situ(gate))
    out.sum().backward()
    assert gate.grad is not None and up.grad is not None


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda g, u: (g.double(), u), "argument 'gate': dtype torch.float64"),
        (lambda g, u: (g, u[:, :3]), r"argument 'up': shape \(2, 3\) differs.*'gate', \(2, 8\)"),
        (lambda g, u: (g, u.bfloat16()), "argument 'up': dtype torch.bfloat16 differs"),
        (lambda g, u: (g, u.to("meta")), "argument 'up': device meta differs"),
        (lambda g, u: (g, 3.0), "argument 'up': expected a tensor, got float"),
        (lambda g, u: (g[0, 0], u[0, 0]), "argument 'gate': a scalar"),
        (lambda g, u: (g.to_sparse(), u), "argument 'gate': layout torch.sparse_coo"),
        (lambda g, u: (g, u, 0.0), "argument 'beta1': must be a positive number, got 0.0"),
        (lambda g, u: (g, u, 4.0, -1), "argument 'beta2': must be a positive number"),
        (lambda g, u: (g, u, 4.0, 25.0, g), r"argument 'weight': shape \(2, 8\).*needs .*\(2,\)"),
        (lambda g, u: (g, u, 4.0, 25.0, g[:, 0].half()), "argument 'weight': .* torch.float16"),
        (lambda g, u: (g, u, 4.0, 25.0, 0.5), "argument 'weight': float; 'gate' of shape"),
    ],
)
def test_refused_before_launch(device, change, match):
    gate, up = torch.randn(2, 8, device=device), torch.randn(2, 8, device=device)
    with pytest.raises(KernelArgumentError, match=match):
        situ_glu(*change(gate, up))
