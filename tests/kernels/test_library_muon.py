"""Muon against singular values in fp64, its step against the definition, and the optimizer."""

import copy
import math

import pytest
import torch

from minitriton.kernels import muon_kernels
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
        ((2, 1, 33, 70), torch.float32, 5), ((33, 70), torch.bfloat16, 5),
        ((70, 33), torch.float16, 1), ((1, 66, 1100), torch.bfloat16, 3),
        ((140, 130), torch.float32, 2), ((1, 1), torch.float32, 5),
    ],
)  # fmt: skip
def test_newton_schulz(device, shape, dtype, steps):
    x = torch.randn(shape, device=device).to(dtype)
    out = newton_schulz(x, steps)
    assert out.shape == x.shape and out.dtype == dtype and out.is_contiguous()
    assert relative(out, moved(x, steps)) < 5e-3


def test_three_products_per_product(device):
    x = with_values(torch.logspace(0, -4, 33), 70, device)
    assert relative(newton_schulz(x, precision="tf32x3"), moved(x)) < 1e-4


def test_uneven_singular_values(device):
    """Decades of singular values, hardly more than rank 3, and repeated rows."""
    low = torch.cat([torch.ones(3), torch.full((30,), 1e-4)])
    repeated = torch.randn(3, 70, device=device).repeat(11, 1).bfloat16()
    for x, bound in (
        (with_values(torch.logspace(0, -3, 33), 70, device), 4e-2),
        (with_values(low, 70, device).bfloat16(), 0.15),
        (repeated, 3e-2),
    ):
        assert relative(newton_schulz(x), moved(x)) < bound


def test_other_steps_and_coefficients(device):
    x, steps = torch.randn(33, 70, device=device), 6
    coefficients = (1.875, -1.25, 0.375)
    out = newton_schulz(x, steps, coefficients, precision="tf32x3")
    assert relative(out, moved(x, steps, coefficients)) < 1e-5


def test_zeros_and_any_scale(device):
    x = torch.randn(2, 33, 70, device=device)
    x[1] = 0
    for scale, dtype in (
        (1.0, torch.float32), (2.0**-20, torch.float32), (2.0**40, torch.float32),
        (2.0**-30, torch.bfloat16), (2.0**-10, torch.float16),
    ):  # fmt: skip
        scaled = (x * scale).to(dtype)
        out = newton_schulz(scaled, 1)
        assert not out[1].any() and relative(out, moved(scaled, 1)) < 5e-3
    assert newton_schulz(x[:0]).shape == (0, 33, 70) and newton_schulz(x[..., :0]).shape[2] == 0


def test_strides(device):
    base = torch.randn(30, 2, 48, device=device)
    for x in (base[::2, :, 8:40].permute(1, 2, 0), base[:1].expand(3, 2, 48)):
        assert relative(newton_schulz(x, 1), moved(x, 1)) < 5e-3


@pytest.mark.parametrize(
    ("shape", "dtype", "steps", "precision", "bound"),
    [
        ((2, 140, 150), torch.float32, 1, "tf32", 5e-3),
        ((1, 150, 130), torch.bfloat16, 3, "tf32", 5e-3),
        ((70, 90), torch.float32, 5, "tf32x3", 1e-5),
    ],
)
def test_tiled_iteration(device, monkeypatch, shape, dtype, steps, precision, bound):
    """Every product a launch, in several groups of blocks."""
    monkeypatch.setattr(muon_kernels, "WIDEST_ALONE", 64)
    monkeypatch.setattr(muon_kernels, "ENOUGH", 1)
    x = torch.randn(shape, device=device).to(dtype)
    assert relative(newton_schulz(x, steps, precision=precision), moved(x, steps)) < bound


def test_step_of_large_block(device):
    """More rows than one program iterates on, tall, with the update fused."""
    grad, weight = torch.randn(270, 260, device=device), torch.randn(270, 260, device=device)
    expected, _ = muon_step_reference(
        weight.double(), grad.double(), 0 * grad.double(), 0.5, steps=1
    )
    change = expected - weight
    lr = torch.full((1,), 0.5, device=device)
    assert muon_step_(weight, grad, torch.zeros_like(weight), lr, steps=1) is weight
    assert relative(weight - expected + change, change) < 6e-3


def test_runs_do_not_vary(device, monkeypatch):
    x = torch.randn(2, 33, 1100, device=device)
    assert torch.equal(newton_schulz(x, 1), newton_schulz(x, 1))
    monkeypatch.setattr(muon_kernels, "WIDEST_ALONE", 32)
    x = x[:, :, :200]
    assert torch.equal(newton_schulz(x, 1), newton_schulz(x, 1))


@pytest.mark.parametrize(
    ("dtypes", "nesterov", "steps"),
    [("fff", True, 5), ("bbb", True, 3), ("fbf", False, 1), ("bff", True, 1)],
)
def test_step(device, dtypes, nesterov, steps):
    """Two steps on weight, gradient and momentum of these dtypes."""
    kinds = [{"f": torch.float32, "b": torch.bfloat16}[c] for c in dtypes]
    weight, buffer = torch.randn(99, 70), torch.randn(99, 70)
    weight, buffer = weight.to(device, kinds[0]), buffer.to(device, kinds[2])
    exact = weight.double(), buffer.double()
    start = exact[0]
    for _ in range(2):
        grad = torch.randn(70, 99, device=device).to(kinds[1]).T
        options = {"heads": 3, "nesterov": nesterov, "steps": steps}
        assert muon_step_(weight, grad, buffer, 0.5, **options) is weight
        exact = muon_step_reference(exact[0], grad.double(), exact[1], 0.5, **options)
    assert relative(buffer, exact[1]) < (1e-6 if kinds[2] == torch.float32 else 5e-3)
    if kinds[0] == torch.float32:
        assert relative(weight - start, exact[0] - start) < 6e-3
    assert relative(weight, exact[0]) < 5e-3  # in bf16 the rounding of weights hides the step's


def test_heads_by_hand(device):
    """[d, heads] order, a stack of matrices, and the sides that count."""
    grad = torch.randn(99, 70, device=device)

    def step(grad, **more):
        options = {"momentum": 0.0, "nesterov": False, "steps": 1, **more}
        weight = torch.zeros(grad.shape, device=device)
        return muon_step_(weight, grad, torch.zeros_like(weight), 1.0, **options)

    by_head = [grad.view(33, 3, 70)[:, h] for h in range(3)]
    expected = torch.stack([moved(g, 1) for g in by_head], 1).reshape(99, 70)
    side = math.sqrt(70)
    out = step(grad, heads=3, head_dim_first=True)
    assert relative(out, -0.2 * side * expected) < 5e-3
    out = step(grad.view(3, 33, 70))
    assert torch.equal(out.view(99, 70), step(grad, heads=3))
    tall = grad[:70, :33].repeat(2, 1)
    expected = moved(grad[:70, :33], 1).repeat(2, 1)
    for by, side in (("block", math.sqrt(70)), ("matrix", math.sqrt(140))):
        out = step(tall, heads=2, scale=0.1, scale_by=by)
        assert relative(out, -0.1 * side * expected) < 5e-3


def test_optimizer(device):
    """A least-squares fit; two groups; a schedule; state saved and loaded half way."""
    target, inputs = torch.randn(33, 70, device=device), torch.randn(30, 70, device=device)

    def make():
        torch.manual_seed(1)
        weights = [torch.nn.Parameter(torch.randn(33, 70, device=device)) for _ in range(2)]
        weights.append(torch.nn.Parameter(torch.randn(3, 3, device=device)))  # never used
        groups = [{"params": weights[:1], "heads": 3}, {"params": weights[1:]}]
        return weights, PerHeadMuon(groups, lr=torch.tensor(1.0, device=device), steps=1)

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
    run(weights, optimizer, 1)
    others, loaded = make()
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for mine, yours in zip(others, weights, strict=True):
        mine.data.copy_(yours.data)
    for group in (*optimizer.param_groups, *loaded.param_groups):
        group["lr"] = torch.full_like(group["lr"], 0.5)
    losses = [run(weights, optimizer, 2), run(others, loaded, 2)]
    assert losses[0] == losses[1] < first / 2
    assert loaded.param_groups[0]["heads"] == 3 and len(loaded.state) == 2
    assert loaded.step(lambda: 7) == 7


def test_operators_are_sound(device):
    x, buffer = torch.randn(99, 70, device=device), torch.zeros(99, 70, device=device)
    lr = torch.tensor(0.1, device=device)
    ops = torch.ops.minitriton
    torch.library.opcheck(ops.newton_schulz, (x[:33], 1, list(MOONLIGHT), "tf32"))
    torch.library.opcheck(
        ops.muon_step,
        (x.clone(), x, buffer, 0.0, lr, 3, False, 0.1, 0.9, True, 1, list(MOONLIGHT), 1.0, "tf32"),
    )

    def step(weight, grad, buffer):
        muon_step_(weight, grad * 2, buffer, lr, heads=3, steps=1)
        return newton_schulz(weight[:33], 1)

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
