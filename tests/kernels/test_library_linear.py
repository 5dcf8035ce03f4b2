"""Linear layers and the GELU perceptron against fp64, as torch operators, and refused arguments."""

import pytest
import torch

from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.gemm import gemm
from minitriton.kernels.gemm_plan import SPLIT_K, plan
from minitriton.kernels.linear import gelu_mlp, gelu_mlp_reference, linear, linear_reference

BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}


def relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    return ((out.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def leaves(device, dtype, *shapes):
    return [
        (torch.randn(s, device=device) / max(1, s[-1]) ** 0.5).to(dtype).requires_grad_()
        for s in shapes
    ]


def check(function, reference, tensors, bound, **options):
    exact = [x.detach().double().requires_grad_() for x in tensors]
    out, expected = function(*tensors, **options), reference(*exact)
    grad = torch.randn(out.shape, device=out.device).to(out.dtype)
    out.backward(grad)
    expected.backward(grad.double())
    assert out.dtype == tensors[0].dtype and out.is_contiguous() and out.shape == expected.shape
    assert relative(out, expected) < bound
    for x, y in zip(tensors, exact, strict=True):
        assert x.grad.dtype == x.dtype and relative(x.grad, y.grad) < 2 * bound


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("rows", "k", "n"), [((3, 5), 40, 17), ((1,), 1, 1), ((70,), 96, 130)])
def test_linear(device, rows, k, n, dtype):
    check(linear, linear_reference, leaves(device, dtype, (*rows, k), (n, k), (n,)), BOUNDS[dtype])


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_gelu_mlp(device, dtype):
    tensors = leaves(device, dtype, (2, 9, 48), (80, 48), (33, 80), (80,), (33,))
    check(gelu_mlp, gelu_mlp_reference, tensors, 2 * BOUNDS[dtype])


@pytest.mark.parametrize(("precision", "bound"), [("tf32", 1e-3), ("tf32x3", 1e-6), ("ieee", 1e-6)])
def test_precisions_of_fp32(device, precision, bound):
    tensors = leaves(device, torch.float32, (40, 64), (24, 64))
    check(linear, linear_reference, tensors, bound, precision=precision)


def test_long_sums_are_sliced(device):
    """The gradient of a weight over many rows: partial sums of slices, added in a fixed order."""
    x, weight, bias = leaves(device, torch.bfloat16, (1201, 40), (24, 40), (24,))
    check(linear, linear_reference, [x, weight, bias], 5e-3)
    a, b = torch.randn(70, 1500, device=device), torch.randn(1500, 33, device=device)
    pre, bias, extra = (torch.randn(s, device=device) for s in ((70, 33), (33,), (70, 33)))
    assert plan(70, 33, 1500, (1500, 1, 33, 1), a.dtype, a.dtype, 132, "none", False).slices == 2
    out = gemm(
        a, b, torch.empty(70, 33, device=device), bias=bias, extra=extra, pre=pre,
        epilogue="gelu_backward",
    )  # fmt: skip
    t = pre.double().requires_grad_()
    slope = torch.autograd.grad(torch.nn.functional.gelu(t).sum(), t)[0]
    expected = (a.double() @ b.double() + bias.double()) * slope + extra.double()
    assert relative(out, expected) < 1e-6


def test_long_fp32_sums_have_no_bias(device):
    """Tensor cores truncate: sums of positive products must not come out too small."""
    a, b = torch.rand(64, 4000, device=device), torch.rand(4000, 64, device=device)
    out = gemm(a, b, torch.empty(64, 64, device=device))
    error = out.double() / (a.double() @ b.double()) - 1
    assert error.mean().abs() < 5e-8 and error.norm() / 64 < 2e-7


def planned(m, n, k, epilogue="none", warpgroups=False):
    kind = torch.bfloat16
    found = plan(m, n, k, (k, 1, 1, k), kind, kind, 132, epilogue, warpgroups)
    return found.config, found.slices


@pytest.mark.parametrize("warpgroups", [False, True])
@pytest.mark.parametrize("epilogue", ["none", "gelu", "reads"])
def test_plan_fills_the_gpu(epilogue, warpgroups):
    for shape in ((16384, 1152, 384), (384, 1152, 16384), (16384, 128, 384), (1, 1, 1)):
        config, slices = planned(*shape, epilogue, warpgroups)
        tiles = -(-shape[0] // config["BLOCK_M"]) * -(-shape[1] // config["BLOCK_N"])
        assert tiles * slices >= 88 or shape[2] < 2 * SPLIT_K


@pytest.mark.parametrize("m", [1, 16, 17, 64])
def test_plan_for_few_rows(m):
    """Slices of K only where a second pass over sums costs less than idle SMs."""
    for n, width, slices in ((8192, 64, 1), (4096, 32, 1), (50304, 64, 1), (2048, 32, 3)):
        config, found = planned(m, n, 8192, warpgroups=True)
        assert (config["BLOCK_N"], found) == (width, slices)
        assert m <= config["BLOCK_M"] < max(2 * m, 17)
        bytes_ = 2 * (config["BLOCK_M"] + width) * config["BLOCK_K"] * config["num_stages"]
        assert bytes_ <= 160 << 10  # in shared memory
    assert planned(m, 64, 48) == planned(m, 64, 64)
    assert planned(65, 8192, 8192)[0]["BLOCK_M"] > 64


@pytest.mark.parametrize("form", ["plain", "a transposed", "b transposed"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 40, 72), (16, 100, 1200), (33, 64, 520)])
def test_few_rows(device, form, m, n, k):
    a = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    b = torch.randn(k, n, device=device, dtype=torch.bfloat16)
    bias = torch.randn(n, device=device)
    a = a.T.contiguous().T if form == "a transposed" else a
    b = b.T.contiguous().T if form == "b transposed" else b
    out = gemm(a, b, torch.empty(m, n, device=device, dtype=torch.bfloat16), bias=bias)
    assert relative(out, a.double() @ b.double() + bias.double()) < 5e-3


def test_masters_with_low_precision_copies(device):
    """Copies are multiplied; gradients are the masters', rounded to nothing narrower than fp32."""
    x, up, down, bias = leaves(device, torch.float32, (9, 48), (80, 48), (33, 80), (33,))
    x = x.detach().bfloat16().requires_grad_()
    low = {"low_up": up.detach().bfloat16(), "low_down": down.detach().bfloat16()}
    exact = [t.detach().double().requires_grad_() for t in (x, *low.values(), bias)]
    out = gelu_mlp(x, up, down, None, bias, **low)
    expected = gelu_mlp_reference(*exact[:3], None, exact[3])
    grad = torch.randn_like(out)
    out.backward(grad)
    expected.backward(grad.double())
    assert out.dtype == torch.bfloat16 and relative(out, expected) < 1e-2
    assert up.grad.dtype == torch.float32
    for mine, theirs in zip((x, up, down, bias), exact, strict=True):
        assert relative(mine.grad, theirs.grad) < 1e-2
    assert relative(bias.grad, grad.double().sum(0)) < 1e-6
    weight = torch.randn(5, 48, device=device, requires_grad=True)
    out = linear(x.detach(), weight, low=weight.detach().bfloat16())
    (dw,) = torch.autograd.grad(out, weight, grad[:, :5])
    assert dw.dtype == torch.float32
    assert relative(dw, grad[:, :5].double().T @ x.detach().double()) < 1e-6


def test_strided_arguments(device):
    base = torch.randn(64, 30, device=device)
    x = base.T.requires_grad_()  # [30, 64] with strides (1, 30)
    weight = torch.randn(2 * 40, 64, device=device)[::2].requires_grad_()
    grad = torch.randn(1, 1, device=device).expand(30, 40)
    out = linear(x, weight)
    dx, dw = torch.autograd.grad(out, (x, weight), grad)
    assert relative(out, x.double() @ weight.double().T) < 1e-6
    assert relative(dx, grad.double() @ weight.double()) < 1e-6
    assert relative(dw, grad.double().T @ x.double()) < 1e-6


def test_empty(device):
    x, weight, bias = leaves(device, torch.float32, (0, 8), (4, 8), (4,))
    linear(x, weight, bias).sum().backward()
    assert x.grad.shape == (0, 8) and not weight.grad.any() and not bias.grad.any()
    x, weight = leaves(device, torch.float32, (5, 0), (4, 0))
    assert torch.equal(linear(x, weight), torch.zeros(5, 4, device=device))


def test_frozen_weight(device):
    x, weight, bias = leaves(device, torch.float32, (6, 8), (4, 8), (4,))
    weight.requires_grad_(False)
    linear(x, weight, bias).sum().backward()
    assert weight.grad is None and bias.grad.eq(6).all()


def test_equal_bits_every_time(device):
    tensors = leaves(device, torch.bfloat16, (1100, 40), (24, 40), (24,))
    runs = [torch.autograd.grad(linear(*tensors).square().sum(), tensors) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_operators_are_sound(device):
    x, weight, bias = leaves(device, torch.float32, (2, 3, 20), (12, 20), (12,))
    torch.library.opcheck(torch.ops.minitriton.linear, (x, weight, None, bias, "tf32x3"))
    up, down = leaves(device, torch.float32, (24, 20), (12, 24))
    torch.library.opcheck(
        torch.ops.minitriton.gelu_mlp,
        (x.mT.contiguous().mT, up, down, None, None, None, bias, "tf32x3"),
    )


def test_torch_compile_without_graph_breaks(device):
    tensors = leaves(device, torch.float32, (6, 20), (24, 20), (12, 24))
    compiled = torch.compile(gelu_mlp, fullgraph=True, backend="aot_eager")
    out, expected = compiled(*tensors), gelu_mlp(*tensors)
    torch.testing.assert_close(out, expected)
    ours = torch.autograd.grad(out.square().sum(), tensors)
    torch.testing.assert_close(ours, torch.autograd.grad(expected.square().sum(), tensors))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda x, w, b: (x.double(), w, b), "argument 'x': dtype torch.float64"),
        (lambda x, w, b: (x, w.half(), b), "argument 'weight': dtype torch.float16 differs"),
        (
            lambda x, w, b: (x, w[:, :3], b),
            r"argument 'weight': shape \(4, 3\); it must be \[N, 8\]",
        ),
        (lambda x, w, b: (x, w, b[:2]), r"argument 'bias': shape \(2,\); .*needs \(4,\)"),
        (lambda x, w, b: (x, w.to("meta"), b), "argument 'weight': device meta differs"),
        (lambda x, w, b: (x, None, b), "argument 'weight': expected a tensor, got NoneType"),
    ],
)
def test_refused_before_launch(device, change, match):
    tensors = [t.detach() for t in leaves(device, torch.float32, (6, 8), (4, 8), (4,))]
    with pytest.raises(KernelArgumentError, match=match):
        linear(*change(*tensors))
    with pytest.raises(KernelArgumentError, match="argument 'precision': must be one of tf32"):
        linear(*tensors, precision="bf16")
    with pytest.raises(KernelArgumentError, match="argument 'low': dtype torch.float32 differs"):
        linear(tensors[0].half(), tensors[1], low=tensors[1])
    with pytest.raises(KernelArgumentError, match=r"argument 'low': shape \(3, 8\) differs"):
        linear(tensors[0], tensors[1], low=tensors[1][:3])
    with pytest.raises(KernelArgumentError, match=r"argument 'down': shape \(3, 9\)"):
        gelu_mlp(*tensors[:2], torch.zeros(3, 9, device=device))
