"""Cross-entropy against fp64, as a torch operator, and refused arguments."""

import pytest
import torch

from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.cross_entropy import cross_entropy, cross_entropy_reference

BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}


def relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    return ((out.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def inputs(device, dtype, rows, columns):
    logits = (torch.randn(rows, columns, device=device) * 3).to(dtype).requires_grad_()
    return logits, torch.randint(columns, (rows,), device=device)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", [(33, 65), (1, 1), (3, 9001), (70, 16)], ids=str)
def test_loss_and_gradient(device, shape, dtype):
    logits, targets = inputs(device, dtype, *shape)
    exact = logits.detach().double().requires_grad_()
    loss, expected = cross_entropy(logits, targets), cross_entropy_reference(exact, targets)
    (loss * 3).backward()
    (expected * 3).backward()
    assert loss.dtype == torch.float32 and loss.dim() == 0
    assert abs(loss.item() - expected.item()) < 2e-6 * max(1, abs(expected.item()))
    assert logits.grad.dtype == dtype
    if shape[1] == 1:  # the gradient is zero: 1 - exp(0), with one rounding of the argument
        assert logits.grad.abs().max() < 5e-7
    else:
        assert relative(logits.grad, exact.grad) < BOUNDS[dtype]


def test_small_probabilities_are_exact(device):
    """Every one to a few units of its last place, not only their sum."""
    logits = torch.randn(7, 300, device=device) * 20
    logits[:, 0] = 60  # the target
    logits.requires_grad_()
    cross_entropy(logits, torch.zeros(7, dtype=torch.int64, device=device)).backward()
    expected = torch.softmax(logits.detach().double(), 1)[:, 1:] / 7
    normal = expected > 1e-36
    found = logits.grad[:, 1:].double()
    # the argument itself is rounded: half a unit per logit
    bound = 3e-7 + 2.0**-24 * (expected.log().abs() + 60)
    assert (((found - expected).abs() / expected) < bound)[normal].all()


def test_ignored_rows_and_unused_columns(device):
    logits, targets = inputs(device, torch.float32, 20, 33)
    targets = targets.clamp(max=29)
    targets[::3] = -100
    with torch.no_grad():
        logits[:, 30:] = float("nan")  # whatever padding holds takes no part
    exact = logits.detach().double().requires_grad_()
    loss = cross_entropy(logits, targets.int(), classes=30)
    expected = cross_entropy_reference(exact, targets, classes=30)
    loss.backward()
    expected.backward()
    assert abs(loss.item() - expected.item()) < 1e-6
    assert relative(logits.grad[:, :30], exact.grad[:, :30]) < 2e-6
    assert not logits.grad[:, 30:].any() and not logits.grad[::3].any()
    assert cross_entropy(logits.nan_to_num(), targets, ignore=3).isnan()  # -100 is then no class


def test_extreme_logits(device):
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e30, -1e30, -1e30]], device=device)
    logits.requires_grad_()
    loss = cross_entropy(logits, torch.tensor([1, 0], device=device))
    loss.backward()
    assert loss.item() == pytest.approx((2e4 + 1.0986123) / 2) and logits.grad.isfinite().all()
    infinite = torch.tensor([[-float("inf"), 1.0, 2.0]], device=device)
    expected = torch.nn.functional.cross_entropy(infinite, torch.tensor([2], device=device))
    torch.testing.assert_close(cross_entropy(infinite, torch.tensor([2], device=device)), expected)
    poisoned = torch.tensor([[0.0, float("nan"), 1.0]], device=device)
    assert cross_entropy(poisoned, torch.tensor([0], device=device)).isnan()


def test_nothing_counted_is_nan(device):
    logits, targets = inputs(device, torch.float32, 4, 5)
    assert cross_entropy(logits, targets * 0 - 100).isnan()
    assert cross_entropy(logits[:0], targets[:0]).isnan()
    for wrong in (5, -1):
        assert cross_entropy(logits, targets * 0 + wrong).isnan()


def test_strided_logits(device):
    _, targets = inputs(device, torch.float32, 6, 8)
    base = torch.randn(6, 16, device=device)
    for logits in (base[:, 8:], torch.randn(8, 6, device=device).T):
        leaf = logits.requires_grad_()
        (ours,) = torch.autograd.grad(cross_entropy(leaf, targets), leaf)
        exact = leaf.detach().double().requires_grad_()
        (theirs,) = torch.autograd.grad(cross_entropy_reference(exact, targets), exact)
        assert relative(ours, theirs) < 2e-6


def test_operator_is_sound(device):
    logits, targets = inputs(device, torch.float32, 6, 8)
    inside = targets.clamp(max=6)
    torch.library.opcheck(torch.ops.minitriton.cross_entropy, (logits, inside, 7, -100))
    compiled = torch.compile(cross_entropy, fullgraph=True, backend="aot_eager")
    (ours,) = torch.autograd.grad(compiled(logits, targets), logits)
    (theirs,) = torch.autograd.grad(cross_entropy(logits, targets), logits)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (
            lambda x, t: cross_entropy(x[0], t),
            r"argument 'logits': shape \(8,\); it must be \[N, V",
        ),
        (lambda x, t: cross_entropy(x.long(), t), "argument 'logits': dtype torch.int64"),
        (lambda x, t: cross_entropy(x, t.float()), "argument 'targets': must be a tensor of int64"),
        (lambda x, t: cross_entropy(x, t[:3]), r"argument 'targets': shape \(3,\); it must have"),
        (lambda x, t: cross_entropy(x, t.to("meta")), "argument 'targets': device meta"),
        (lambda x, t: cross_entropy(x, t, classes=9), "argument 'classes': must be in 1 to 8"),
    ],
)
def test_refused_before_launch(device, call, match):
    with pytest.raises(KernelArgumentError, match=match):
        call(*inputs(device, torch.float32, 6, 8))
