"""Muon against singular values in fp64, its step against the definition, and the optimizer."""

import math

import pytest
import torch

from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.muon import (
    MOONLIGHT,
    PerHeadMuon,
    muon_step_,
    muon_step_reference,
    newton_schulz,
    newton_schulz_reference,
)


def relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    return ((out.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def moved(x, steps=5, coefficients=MOONLIGHT):
    """The iteration on singular values, in fp64."""
    a, b, c = coefficients
    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / (s.square().sum(-1, keepdim=True).sqrt() + 1e-7)
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return u @ (s[..., None] * v)


def with_values(values, columns, device):
    """A matrix with these singular values."""
    u, _ = torch.linalg.qr(torch.randn(len(values), len(values)))
    v, _ = torch.linalg.qr(torch.randn(columns, len(values)))
    return (u @ torch.diag(values) @ v.T).to(device)


@pytest.mark.parametrize(
    ("shape", "dtype", "steps"),
    [
        ((2, 2, 33, 70), torch.float32, 5), ((2, 2, 33, 70), torch.bfloat16, 5),
        ((70, 33), torch.float16, 4), ((1, 66, 1100), torch.bfloat16, 3),
        ((140, 130), torch.float32, 2), ((1, 1), torch.float32, 5),
    ],
)  # fmt: skip
def test_newton_schulz(device, shape, dtype, steps):
    x = torch.randn(shape, device=device).to(dtype)
    out = newton_schulz(x, steps)
    assert out.shape == x.shape and out.dtype == dtype and out.is_contiguous()
    assert relative(out, moved(x, steps)) < 5e-3


def test_three_products_per_product(device):
    for values in (torch.linspace(1, 0.3, 33), torch.logspace(0, -4, 33)):
        x = with_values(values, 70, device)
        assert relative(newton_schulz(x, precision="tf32x3"), moved(x)) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_uneven_singular_values(device, dtype):
    """Decades of singular values, hardly more than rank 3, and repeated rows."""
    low = torch.cat([torch.ones(3), torch.full((30,), 1e-4)])
    for values, bound in ((torch.logspace(0, -3, 33), 4e-2), (low, 0.15)):
        x = with_values(values, 70, device).to(dtype)
        assert relative(newton_schulz(x), moved(x)) < bound
    x = torch.randn(3, 70, device=device).repeat(11, 1).to(dtype)
    assert relative(newton_schulz(x), moved(x)) < 1e-2


@pytest.mark.parametrize("steps", [1, 3, 6])
def test_other_steps_and_coefficients(device, steps):
    x = torch.randn(33, 70, device=device)
    coefficients = (1.875, -1.25, 0.375)
    out = newton_schulz(x, steps, coefficients, precision="tf32x3")
    assert relative(out, moved(x, steps, coefficients)) < 1e-5


def test_zeros_and_any_scale(device):
    x = torch.randn(3, 33, 70, device=device)
    x[1] = 0
    for scale, dtype in (
        (1.0, torch.float32), (2.0**-20, torch.float32), (2.0**40, torch.float32),
        (2.0**-30, torch.bfloat16), (2.0**-10, torch.float16),
    ):  # fmt: skip
        scaled = (x * scale).to(dtype)
        out = newton_schulz(scaled, 3)
        assert not out[1].any() and relative(out, moved(scaled, 3)) < 1e-2
    assert newton_schulz(x[:0]).shape == (0, 33, 70) and newton_schulz(x[..., :0]).shape[2] == 0


def test_strides(device):
    base = torch.randn(30, 2, 48, device=device)
    for x in (base.transpose(0, 1), base[::2, :, 8:40].permute(1, 2, 0), base[:1].expand(3, 2, 48)):
        assert relative(newton_schulz(x, 1), moved(x, 1)) < 5e-3


def test_large_blocks_by_torch(device):
    x = torch.randn(258, 300, device=device)
    assert relative(newton_schulz(x), moved(x)) < (5e-3 if device == "cuda" else 1e-5)
    weight, buffer = torch.randn(300, 258, device=device), torch.zeros(300, 258, device=device)
    expected, _ = muon_step_reference(weight, x.T, buffer, 0.1)
    assert muon_step_(weight, x.T, buffer, torch.full((1,), 0.1, device=device)) is weight
    torch.testing.assert_close(weight, expected, rtol=1e-2, atol=1e-3)


def test_runs_do_not_vary(device):
    x = torch.randn(2, 33, 1100, device=device)
    assert torch.equal(newton_schulz(x, 3), newton_schulz(x, 3))


@pytest.mark.parametrize(
    ("dtypes", "nesterov"), [("fff", True), ("bbb", True), ("fbf", False), ("bff", True)]
)
def test_step(device, dtypes, nesterov):
    """Two steps on weight, gradient and momentum of these dtypes."""
    kinds = [{"f": torch.float32, "b": torch.bfloat16}[c] for c in dtypes]
    weight, buffer = torch.randn(99, 70), torch.randn(99, 70)
    weight, buffer = weight.to(device, kinds[0]), buffer.to(device, kinds[2])
    exact = weight.double(), buffer.double()
    start = exact[0]
    for _ in range(2):
        grad = torch.randn(70, 99, device=device).to(kinds[1]).T
        assert muon_step_(weight, grad, buffer, 0.5, heads=3, nesterov=nesterov) is weight
        exact = muon_step_reference(
            exact[0], grad.double(), exact[1], 0.5, heads=3, nesterov=nesterov
        )
    assert relative(buffer, exact[1]) < (1e-6 if kinds[2] == torch.float32 else 5e-3)
    # a weight in bf16 is rounded by as much as a hundredth of the step
    bound = 6e-3 if kinds[0] == torch.float32 else 2e-2
    assert relative(weight - start, exact[0] - start) < bound


def test_heads_by_hand(device):
    """[d, heads] order, a stack of matrices, and the sides that count."""
    weight, grad = torch.randn(12, 30, device=device), torch.randn(12, 30, device=device)
    options = {"weight_decay": 0.0, "momentum": 0.0, "nesterov": False, "precision": "tf32x3"}

    def step(weight, grad, **more):
        return (
            muon_step_(weight.clone(), grad, torch.zeros_like(grad), 1.0, **options, **more)
            - weight
        )

    by_head = [grad.view(4, 3, 30)[:, h] for h in range(3)]
    expected = torch.stack([moved(g) for g in by_head], 1).reshape(12, 30)
    got = step(weight, grad, heads=3, head_dim_first=True)
    torch.testing.assert_close(got.double(), -0.2 * math.sqrt(30) * expected, rtol=0, atol=1e-5)
    stacked = step(weight.view(3, 4, 30), grad.view(3, 4, 30)).view(12, 30)
    torch.testing.assert_close(stacked, step(weight, grad, heads=3))
    tall = step(weight.T.contiguous(), grad.T.contiguous(), heads=2, scale=0.1, scale_by="matrix")
    expected = torch.cat([moved(g) for g in grad.T.split(15)])
    torch.testing.assert_close(tall.double(), -0.1 * math.sqrt(30) * expected, rtol=0, atol=1e-5)


def test_a_loud_head_does_not_drown_the_others(device):
    grad = torch.randn(32, 64, device=device)
    grad[:8] *= 1000
    norms = []
    for heads in (4, 1):
        step = muon_step_(torch.zeros_like(grad), grad, torch.zeros_like(grad), 1.0, heads=heads)
        norms.append(step.view(4, -1).norm(dim=1))
    assert norms[0].max() / norms[0].min() < 1.2 < norms[1].max() / norms[1].min()


def test_optimizer(device):
    """A least-squares fit; two groups; a schedule; state saved and loaded half way."""
    torch.manual_seed(0)
    target, inputs = torch.randn(24, 16, device=device), torch.randn(64, 16, device=device)

    def make():
        torch.manual_seed(1)
        weights = [torch.nn.Parameter(torch.randn(24, 16, device=device)) for _ in range(2)]
        weights.append(torch.nn.Parameter(torch.randn(3, 3, device=device)))  # never used
        groups = [{"params": weights[:1], "heads": 3}, {"params": weights[1:]}]
        return weights, PerHeadMuon(groups, torch.tensor(0.1, device=device), weight_decay=0.0)

    def run(weights, optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            error = inputs @ (weights[0] + weights[1] - target).T
            loss = error.square().mean()
            loss.backward()
            optimizer.step()
        return loss.item()

    weights, optimizer = make()
    first = run(weights, optimizer, 1)
    run(weights, optimizer, 2)
    others, loaded = make()
    loaded.load_state_dict(optimizer.state_dict())
    for mine, yours in zip(others, weights, strict=True):
        mine.data.copy_(yours.data)
    for group in (*optimizer.param_groups, *loaded.param_groups):
        group["lr"] = torch.full_like(group["lr"], 0.05)
    losses = [run(weights, optimizer, 3), run(others, loaded, 3)]
    assert losses[0] == losses[1] < first / 4
    assert loaded.param_groups[0]["heads"] == 3 and len(loaded.state) == 2
    assert loaded.step(lambda: 7) == 7


def test_operators_are_sound(device):
    x, buffer = torch.randn(8, 20, device=device), torch.zeros(8, 20, device=device)
    lr = torch.tensor(0.1, device=device)
    ops = torch.ops.minitriton
    torch.library.opcheck(ops.newton_schulz, (x.T, 5, list(MOONLIGHT), "tf32"))
    torch.library.opcheck(
        ops.muon_step,
        (x.clone(), x, buffer, 0.0, lr, 2, False, 0.1, 0.9, True, 5, list(MOONLIGHT), 1.0, "tf32"),
    )

    def step(weight, grad, buffer):
        muon_step_(weight, grad * 2, buffer, lr, heads=2)
        return newton_schulz(weight)

    ours, theirs = (x.clone(), buffer.clone()), (x.clone(), buffer.clone())
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ours[0], x, ours[1]), step(theirs[0], x, theirs[1]))
    torch.testing.assert_close(ours, theirs)


def test_reference_is_the_singular_value_map(device):
    x = torch.randn(2, 9, 5, dtype=torch.float64)
    torch.testing.assert_close(newton_schulz_reference(x), moved(x))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda w: newton_schulz(w.double()), "argument 'x': dtype torch.float64"),
        (lambda w: newton_schulz(w[0]), r"argument 'x': shape \(8,\); it must be \[..., rows"),
        (lambda w: newton_schulz(w.requires_grad_()), "argument 'x': requires a gradient"),
        (lambda w: newton_schulz(w, 0), "argument 'steps': must be a whole number from 1 to 100"),
        (lambda w: newton_schulz(w, 5, (1.0, 2.0)), "argument 'coefficients': must be three num"),
        (lambda w: newton_schulz(w, precision="fp32"), "argument 'precision': 'fp32'; it must be"),
        (lambda w: muon_step_(w[0], w[0], w[0], 0.1), r"argument 'weight': shape \(8,\)"),
        (lambda w: muon_step_(w.int(), w, w, 0.1), "argument 'weight': dtype torch.int32"),
        (lambda w: muon_step_(w, w[:5], w, 0.1), r"argument 'grad': shape \(5, 8\) on .* needs"),
        (lambda w: muon_step_(w, w.to_sparse(), w, 0.1), "argument 'grad': layout"),
        (lambda w: muon_step_(w, w, w.to("meta"), 0.1), "argument 'momentum_buffer': .* on meta"),
        (
            lambda w: muon_step_(w, w, w.T.contiguous().T, 0.1),
            "'momentum_buffer': strides .* contig",
        ),
        (lambda w: muon_step_(w, w, w.clone(), 0.1, heads=4), "argument 'heads': 4 does not div"),
        (lambda w: muon_step_(w, w, w.clone(), 0.1, heads=0), "argument 'heads': must be a whole"),
        (lambda w: muon_step_(w, w, w.clone(), -1), "argument 'lr': must be a positive number"),
        (lambda w: muon_step_(w, w, w.clone(), w[0]), r"argument 'lr': torch.float32 \(8,\) on"),
        (lambda w: muon_step_(w, w, w.clone(), 0.1, momentum=1), "argument 'momentum': must be in"),
        (lambda w: muon_step_(w, w, w.clone(), 0.1, scale_by="row"), "argument 'scale_by': 'row'"),
        (lambda w: PerHeadMuon([w], heads=4), "argument 'heads': 4 does not divide the 6 rows"),
        (lambda w: PerHeadMuon([w[0].clone()]), r"argument 'weight': shape \(8,\)"),
    ],
)
def test_refused_before_launch(device, call, match):
    with pytest.raises(KernelArgumentError, match=match):
        call(torch.zeros(6, 8, device=device))
