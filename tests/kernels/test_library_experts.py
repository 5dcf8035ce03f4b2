"""The routed experts against fp64 and their definition, as torch operators, and refusals."""

import pytest
import torch

from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.moe_experts import (
    expert_tile_rows,
    local_experts,
    moe_experts,
    moe_experts_reference,
)
from minitriton.kernels.moe_routing import moe_route_reference
from minitriton.kernels.situ import situ_glu_reference

# relative rms: output and dz; gradients of the weights and of p
BOUNDS = {
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (5e-3, 8e-3),
    torch.float16: (1e-3, 1e-3),
}


def relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    return ((out.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def routing_of(tokens, experts, k, tile_rows, device, allowed=None):
    """Uneven experts; `allowed`: only these are chosen."""
    logits = torch.randn(tokens, experts) + 1.5 * torch.randn(experts)
    if allowed is not None:
        logits[:, [e for e in range(experts) if e not in allowed]] -= 100
    made = moe_route_reference(logits, None, k, tile_rows=tile_rows)
    return type(made)(*(x.to(device) for x in made))


def operands(tokens, experts, latent, ff, dtype, device):
    made = (
        torch.randn(tokens, latent),
        torch.randn(experts, 2 * ff, latent) * 2 / latent**0.5,
        torch.randn(experts, latent, ff) / ff**0.5,
    )
    return [x.to(device, dtype).requires_grad_() for x in made]


def check(tensors, routing, bounds, **betas):
    """Output and all gradients of one call within bounds of fp64."""
    p = routing.weights.clone().requires_grad_()
    exact = [x.detach().double().requires_grad_() for x in (*tensors, p)]
    out = moe_experts(*tensors, routing, p, **betas)
    expected = moe_experts_reference(*exact[:3], routing, exact[3], **betas)
    grad = torch.randn(out.shape, device=out.device).to(out.dtype)
    ours = torch.autograd.grad(out, [*tensors, p], grad)
    theirs = torch.autograd.grad(expected, exact, grad.double())
    assert out.dtype == tensors[0].dtype and out.is_contiguous()
    assert relative(out, expected) < bounds[0]
    for x, ours_, theirs_ in zip((*tensors, p), ours, theirs, strict=True):
        assert ours_.dtype == x.dtype and ours_.shape == x.shape
        assert relative(ours_, theirs_) < bounds[1]
    return ours


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((13, 5, 2, 64, 48, 16), torch.bfloat16),
        ((36, 2, 2, 64, 48, 64), torch.bfloat16),
        ((50, 2, 1, 64, 48, 128), torch.bfloat16),
        ((7, 3, 3, 33, 17, 16), torch.float16),  # every token visits every expert
    ],
    ids=str,
)
def test_experts(device, shape, dtype):
    tokens, experts, k, latent, ff, tile_rows = shape
    routing = routing_of(tokens, experts, k, tile_rows, device)
    check(operands(tokens, experts, latent, ff, dtype, device), routing, BOUNDS[dtype])


def test_definition(device):
    """Token by token from the numbers of the experts alone."""
    routing = routing_of(7, 5, 2, 16, device)
    z, w13, w2 = (x.detach() for x in operands(7, 5, 32, 48, torch.float32, device))
    rows = []
    for t in range(7):
        u = torch.zeros(32, dtype=torch.float64, device=device)
        for e, p in zip(routing.experts[t].tolist(), routing.weights[t].double(), strict=True):
            gate, up = (w13[e].double() @ z[t].double()).chunk(2)
            u += p * (w2[e].double() @ situ_glu_reference(gate, up))
        rows.append(u)
    assert relative(moe_experts(z, w13, w2, routing), torch.stack(rows)) < 1e-6


def test_experts_without_tokens_get_zero_gradients(device):
    routing = routing_of(13, 6, 2, 16, device, allowed=(1, 4))
    tensors = operands(13, 6, 32, 48, torch.float32, device)
    _, dw13, dw2, _ = check(tensors, routing, BOUNDS[torch.float32])
    for e in (0, 2, 3, 5):
        assert not dw13[e].any() and not dw2[e].any()


def test_one_expert_takes_all(device):
    routing = routing_of(35, 3, 1, 16, device, allowed=(2,))
    check(operands(35, 3, 32, 48, torch.float32, device), routing, BOUNDS[torch.float32])


def test_one_token_uncapped(device):
    routing = routing_of(1, 9, 2, 16, device)
    tensors = operands(1, 9, 32, 48, torch.float32, device)
    check(tensors, routing, BOUNDS[torch.float32], beta1=1.0, beta2=None)


def test_norm_of_the_sum(device):
    """One launch without gradients, two with them: the same numbers."""
    routing = routing_of(13, 5, 2, 16, device)
    tensors = operands(13, 5, 64, 48, torch.bfloat16, device)
    norm = (1 + 0.2 * torch.randn(64, device=device)).requires_grad_()
    exact = [x.detach().double().requires_grad_() for x in (*tensors, norm)]
    out = moe_experts(*tensors, routing, norm_weight=norm, eps=0.1)
    expected = moe_experts_reference(*exact[:3], routing, norm_weight=exact[3], eps=0.1)
    assert relative(out, expected) < 6e-3  # the sum is rounded before it is divided
    grad = torch.randn(out.shape, device=device).bfloat16()
    ours = torch.autograd.grad(out, (*tensors, norm), grad)
    theirs = torch.autograd.grad(expected, exact, grad.double())
    assert all(relative(a, b) < 1e-2 for a, b in zip(ours, theirs, strict=True))
    with torch.no_grad():
        fused = moe_experts(*tensors, routing, norm_weight=norm, eps=0.1)
    torch.testing.assert_close(fused, out, rtol=8e-3, atol=1e-5)  # one unit of the last place


def test_no_tokens(device):
    routing = routing_of(0, 3, 2, 16, device)
    z, w13, w2 = operands(0, 3, 16, 8, torch.bfloat16, device)
    out = moe_experts(z, w13, w2, routing)
    out.sum().backward()
    assert out.shape == (0, 16) and z.grad.shape == (0, 16)
    assert not w13.grad.any() and not w2.grad.any()


def test_slices_of_the_experts_add_up(device):
    routing = routing_of(11, 5, 2, 16, device)
    z, w13, w2 = operands(11, 5, 32, 48, torch.float32, device)
    p = routing.weights.clone().requires_grad_()
    whole = moe_experts(z, w13, w2, routing, p)
    parts = [
        moe_experts(z, w13[a:b], w2[a:b], local_experts(routing, a, b - a), p)
        for a, b in ((0, 3), (3, 5), (5, 5))
    ]
    total = sum(parts)
    torch.testing.assert_close(total, whole)
    grad = torch.randn_like(whole)
    ours = torch.autograd.grad(total, (z, w13, w2, p), grad)
    theirs = torch.autograd.grad(whole, (z, w13, w2, p), grad)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_strided_operands(device):
    routing = routing_of(11, 4, 2, 16, device)
    z = torch.randn(11, 64, device=device)[:, 7:39].requires_grad_()
    w13 = torch.randn(4, 32, 96, device=device).transpose(1, 2).requires_grad_()
    w2 = torch.randn(4, 48, 32, device=device).transpose(1, 2).requires_grad_()
    check([z, w13, w2], routing, BOUNDS[torch.float32])
    spread = torch.randn(4, 96, 64, device=device)[:, :, ::2].requires_grad_()  # copied
    exact = [x.detach().double().requires_grad_() for x in (z, spread, w2)]
    moe_experts(z, spread, w2, routing).sum().backward()  # the gradient is one number everywhere
    moe_experts_reference(*exact, routing).sum().backward()
    assert relative(spread.grad, exact[1].grad) < 1e-5


def test_gradients_of_some(device):
    """Frozen experts, and weights alone, as with a router that trains."""
    routing = routing_of(11, 4, 2, 16, device)
    z, w13, w2 = operands(11, 4, 32, 48, torch.float32, device)
    p = routing.weights.clone().requires_grad_()
    full = torch.autograd.grad(moe_experts(z, w13, w2, routing, p).square().sum(), (z, w13, p))
    frozen = moe_experts(z, w13.detach(), w2.detach(), routing, p).square().sum()
    assert all(map(torch.equal, torch.autograd.grad(frozen, (z, p)), (full[0], full[2])))
    half = moe_experts(z.detach(), w13, w2.detach(), routing).square().sum()
    assert torch.equal(torch.autograd.grad(half, w13)[0], full[1])
    with torch.no_grad():
        assert torch.equal(moe_experts(z, w13, w2, routing, p).square().sum(), half)


def test_results_do_not_vary(device):
    routing = routing_of(11, 4, 2, 16, device)
    tensors = [*operands(11, 4, 64, 48, torch.bfloat16, device), routing.weights.requires_grad_()]
    runs = []
    for _ in range(2):
        out = moe_experts(*tensors[:3], routing, tensors[3])
        runs.append((out, *torch.autograd.grad(out.float().square().sum(), tensors)))
    assert all(map(torch.equal, *runs))


def test_operator_is_sound(device):
    routing = routing_of(5, 3, 2, 16, device)
    tensors = operands(5, 3, 32, 48, torch.float32, device)
    tables = (routing.row_of_slot, routing.token_of_row, routing.expert_of_tile)
    torch.library.opcheck(
        torch.ops.minitriton.moe_experts,
        (*tensors, routing.weights.requires_grad_(), *tables, routing.offsets, routing.counts, 4.0,
         None, None, 1.0, True),
    )  # fmt: skip


def test_torch_compile_without_graph_breaks(device):
    routing = routing_of(5, 3, 2, 16, device)
    tensors = [*operands(5, 3, 32, 48, torch.float32, device), routing.weights.requires_grad_()]

    def layer(z, w13, w2, p):
        return moe_experts(z * 2, w13, w2, routing, p) + z

    out = torch.compile(layer, fullgraph=True, backend="aot_eager")(*tensors)
    expected = layer(*tensors)
    torch.testing.assert_close(out, expected)
    ours = torch.autograd.grad(out.square().sum(), tensors)
    torch.testing.assert_close(ours, torch.autograd.grad(expected.square().sum(), tensors))


def test_rows_per_tile():
    assert expert_tile_rows(64, 16, 896) == 16
    assert expert_tile_rows(2048, 16, 896) == 64
    assert expert_tile_rows(8192, 16, 896, mxfp4=True) == 64
    assert expert_tile_rows(8192, 16, 896) == 128


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda z, w, v, r, p: ([z], w, v, r, p), "argument 'z': expected a tensor, got list"),
        (lambda z, w, v, r, p: (z[0], w, v, r, p), r"argument 'z': shape \(16,\); it must be"),
        (lambda z, w, v, r, p: (z.double(), w, v, r, p), "argument 'z': dtype torch.float64"),
        (lambda z, w, v, r, p: (z, w.half(), v, r, p), "'w13': dtype torch.float16 differs"),
        (lambda z, w, v, r, p: (z, w[:, 1:], v, r, p), r"'w13': shape \(3, 15, 16\); .* need"),
        (lambda z, w, v, r, p: (z, w[..., 1:], v, r, p), r"'w13': shape \(3, 16, 15\); .* need"),
        (lambda z, w, v, r, p: (z, w, v[:2], r, p), r"'w2': shape \(2, 16, 8\); .*\(3, 16, 8\)"),
        (lambda z, w, v, r, p: (z, w, v.to("meta"), r, p), "argument 'w2': device meta differs"),
        (lambda z, w, v, r, p: (z, w, v, tuple(r), p), "'routing': expected a Routing, got tuple"),
        (lambda z, w, v, r, p: (z[:4], w, v, r, p), r"'routing': row_of_slot has shape \(5, 2\)"),
        (lambda z, w, v, r, p: (z, w, v, r._replace(counts=r.counts.long()), p),
         "'routing': counts must be contiguous int32"),
        (lambda z, w, v, r, p: (z, w, v, r._replace(expert_of_tile=r.expert_of_tile[:1]), p),
         "route with tile_rows 16, 64 or 128"),
        (lambda z, w, v, r, p: (z, w[:2], v[:2], r, p), r"'routing': counts has shape \(3,\)"),
        (lambda z, w, v, r, p: (z, w, v, r, p.half()), r"'weights': shape \(5, 2\), torch.float16"),
        (lambda z, w, v, r, p: (z, w, v, r, p[:, :1]), r"'weights': shape \(5, 1\)"),
        (lambda z, w, v, r, p: (z, w, v, r, p, 0), "argument 'beta1': must be a positive number"),
        (lambda z, w, v, r, p: (z, w, v, r, p, 4, -1), "argument 'beta2': must be a positive"),
        (lambda z, w, v, r, p: (z, w, v, r, p, 4, 25, p[0]), r"'norm_weight': shape \(2,\)"),
        (lambda z, w, v, r, p: (z, w, v, r, p, 4, 25, None, 0), "argument 'eps': must be a pos"),
    ],
)  # fmt: skip
def test_refused_before_launch(device, change, match):
    routing = routing_of(5, 3, 2, 16, device)
    tensors = [x.detach() for x in operands(5, 3, 16, 8, torch.float32, device)]
    with pytest.raises(KernelArgumentError, match=match):
        moe_experts(*change(*tensors, routing, routing.weights))


def test_refused_slices(device):
    routing = routing_of(5, 3, 2, 16, device)
    with pytest.raises(KernelArgumentError, match=r"'first': experts 2 \.\. 3 are not within 0"):
        local_experts(routing, 2, 2)
