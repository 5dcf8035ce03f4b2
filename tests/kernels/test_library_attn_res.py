"""The mix over depth against fp64, as a torch operator, and refused arguments."""

import pytest
import torch

from minitriton.kernels import attn_res, attn_res_mix, attn_res_mix_reference
from minitriton.kernels.checks import KernelArgumentError

# relative rms: output, gradient of the values, gradients of query and norm weight
BOUNDS = {
    torch.float32: (5e-6, 1e-5, 1e-5),
    torch.bfloat16: (5e-3, 8e-3, 2e-2),
    torch.float16: (1e-3, 2e-3, 4e-3),
}
SHAPES = [
    (1, 3, 96), (2, 1, 8), (2, 17, 130), (5, 1, 1024), (5, 3, 130), (9, 3, 1024), (9, 17, 8),
    (9, 1, 96), (5, 17, 96), (3, 2, 1),
]  # fmt: skip


def relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    return ((out.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def inputs(shape, dtype, device, query_scale=None, parameters=None):
    """Values, query and norm weight; by default the logits have a standard deviation of 1.5."""
    d = shape[2]
    query_scale = 1.5 / d**0.5 if query_scale is None else query_scale
    scales = 0.3 + 3 * torch.rand(shape[0], shape[1], 1, device=device)
    made = (
        torch.randn(shape, device=device) * scales,
        torch.randn(d, device=device) * query_scale,
        1 + 0.2 * torch.randn(d, device=device),
    )
    dtypes = (dtype, parameters or dtype, parameters or dtype)
    return [x.to(t).requires_grad_() for x, t in zip(made, dtypes, strict=True)]


def check(tensors, bounds, eps=1e-5):
    """Output and gradients of one call within bounds of fp64; one source: no slope of softmax."""
    exact = [x.detach().double().requires_grad_() for x in tensors]
    out, expected = attn_res_mix(*tensors, eps), attn_res_mix_reference(*exact, eps)
    grad = torch.randn(out.shape, device=out.device).to(out.dtype)
    out.backward(grad)
    expected.backward(grad.double())
    assert out.dtype == tensors[0].dtype and out.is_contiguous()
    assert relative(out, expected) < bounds[0]
    for x, y, bound in zip(tensors, exact, (bounds[1], bounds[2], bounds[2]), strict=True):
        assert x.grad.dtype == x.dtype
        if x.dim() == 1 and tensors[0].shape[0] == 1:
            assert x.grad.abs().max() < 1e-5
        else:
            assert relative(x.grad, y.grad) < bound


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mix(device, shape, dtype):
    check(inputs(shape, dtype, device), BOUNDS[dtype])


def test_fp32_parameters_of_bf16_values(device):
    check(inputs((4, 5, 96), torch.bfloat16, device, parameters=torch.float32), (5e-3, 8e-3, 1e-5))


def test_widest_row(device):
    check(inputs((3, 2, 8192), torch.bfloat16, device), BOUNDS[torch.bfloat16])


@pytest.mark.parametrize("sign", [1, -1])
def test_large_logits_keep_their_precision(device, sign):
    values, query, weight = inputs((5, 17, 96), torch.float32, device, query_scale=sign * 10.0)
    assert attn_res_mix(values, query, weight).isfinite().all()
    check([values, query, weight], (1e-5, 1e-4, 1e-3))
    ordered = torch.arange(1.0, 6.0, device=device).view(5, 1, 1) * torch.ones(5, 2, 96).to(device)
    for direction in (1, -1):  # the peak at the last and at the first source
        values = ordered if direction == 1 else ordered.flip(0)
        out = attn_res_mix(
            values, torch.full((96,), 1e4, device=device), weight.detach() * 0 + 1, 30.0
        )
        torch.testing.assert_close(out, torch.full_like(out, 5.0))


def test_zero_query_is_the_mean(device):
    values, _, weight = inputs((7, 3, 40), torch.float32, device)
    out = attn_res_mix(values, torch.zeros(40, device=device), weight)
    torch.testing.assert_close(out, values.mean(0))


def test_zero_values_and_eps(device):
    values, query, weight = inputs((4, 3, 64), torch.float32, device)
    with torch.no_grad():
        values[1] = 0
        values[2] *= 1e-3
    check([values, query, weight], BOUNDS[torch.float32], eps=0.5)


def test_programs_that_own_several_tokens(device, monkeypatch):
    monkeypatch.setattr(attn_res, "PARTIALS", 4 * 128)
    check(inputs((3, 11, 100), torch.float32, device), BOUNDS[torch.float32])


def test_gradients_do_not_vary(device):
    tensors = inputs((3, 11, 100), torch.bfloat16, device)
    runs = [torch.autograd.grad(attn_res_mix(*tensors).square().sum(), tensors) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_strided_values(device):
    weight, query = 1 + 0.1 * torch.randn(48, device=device), torch.randn(48, device=device)
    base = torch.randn(5, 4, 2 * 48, device=device)
    for values in (
        base.transpose(0, 1)[:, :, :48],
        base[:, :1, 48:].expand(5, 4, 48),
        torch.randn(48, 3, 2, device=device).permute(1, 2, 0),
    ):
        check([values.requires_grad_(), query.clone().requires_grad_(), weight.requires_grad_()],
              BOUNDS[torch.float32])  # fmt: skip
        weight = weight.detach()
    tensors = inputs((2, 3, 33), torch.float32, device)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    attn_res_mix(*tensors).sum().backward()  # the incoming gradient is one number seen everywhere
    attn_res_mix_reference(*exact).sum().backward()
    assert relative(tensors[0].grad, exact[0].grad) < 1e-5


def test_no_tokens(device):
    tensors = inputs((2, 0, 24), torch.float32, device)
    out = attn_res_mix(*tensors)
    out.sum().backward()
    assert out.shape == (0, 24) and tensors[0].grad.shape == (2, 0, 24)
    assert not tensors[1].grad.any() and not tensors[2].grad.any()


def test_operator_is_sound(device):
    tensors = inputs((3, 4, 20), torch.float32, device)
    torch.library.opcheck(torch.ops.minitriton.attn_res, (*tensors, 1e-5))
    permuted = torch.randn(20, 4, 3, device=device).permute(2, 1, 0).requires_grad_()
    torch.library.opcheck(torch.ops.minitriton.attn_res, (permuted, *tensors[1:], 1e-5))


def test_torch_compile_without_graph_breaks(device):
    tensors = inputs((3, 4, 50), torch.float32, device)
    compiled = torch.compile(
        lambda v, q, n: attn_res_mix(v * 2, q, n) + v[0], fullgraph=True, backend="aot_eager"
    )
    out = compiled(*tensors)
    expected = attn_res_mix(tensors[0] * 2, *tensors[1:]) + tensors[0][0]
    torch.testing.assert_close(out, expected)
    ours = torch.autograd.grad(out.square().sum(), tensors)
    theirs = torch.autograd.grad(expected.square().sum(), tensors)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda v, q, n: (v.double(), q, n), "argument 'values': dtype torch.float64"),
        (lambda v, q, n: ([v], q, n), "argument 'values': expected a tensor, got list"),
        (lambda v, q, n: (v[0], q, n), r"argument 'values': shape \(4, 8\); it must be \[L, N, d"),
        (lambda v, q, n: (v[:0], q, n), r"argument 'values': shape \(0, 4, 8\); it must be"),
        (lambda v, q, n: (v[..., :0], q, n), r"argument 'values': shape \(3, 4, 0\)"),
        (lambda v, q, n: (v.repeat(1, 1, 1025), q, n), "with L >= 1 and 1 <= d <= 8192"),
        (lambda v, q, n: (v, q[:3], n), r"argument 'query': shape \(3,\); .*needs \(8,\)"),
        (lambda v, q, n: (v, q, n[None]), r"argument 'norm_weight': shape \(1, 8\)"),
        (lambda v, q, n: (v, q.long(), n), "argument 'query': dtype torch.int64"),
        (lambda v, q, n: (v, q, n.to("meta")), "argument 'norm_weight': device meta differs"),
        (lambda v, q, n: (v, q, None), "argument 'norm_weight': expected a tensor, got NoneType"),
        (lambda v, q, n: (v, q, n, 0.0), "argument 'eps': must be a positive number, got 0.0"),
    ],
)
def test_refused_before_launch(device, change, match):
    tensors = [x.detach() for x in inputs((3, 4, 8), torch.float32, device)]
    with pytest.raises(KernelArgumentError, match=match):
        attn_res_mix(*change(*tensors))
