"""AdamW against torch's, step by step, its state, and refused arguments."""

import copy
import io

import pytest
import torch

from minitriton.kernels.adamw import AdamW
from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.chunks import CHUNK, FAN

SHAPES = [(CHUNK + 5, 2), (3,), (7, 11), (), (1, 1, 2)]


def parameters(device, shapes=SHAPES):
    made = [torch.nn.Parameter(torch.randn(s, device=device)) for s in shapes]
    return made, [torch.nn.Parameter(p.detach().clone()) for p in made]


def groups(params, **options):
    return [{"params": params[::2], "weight_decay": 0.1, **options}, {"params": params[1::2]}]


def set_gradients(ours, theirs, scale=1.0):
    for p, q in zip(ours, theirs, strict=True):
        p.grad = torch.randn_like(p) * scale
        q.grad = p.grad.clone()


def assert_equal_to(ours, theirs, bound=1e-6):
    """Relative rms within bound, and no element far off: both sides round at every step."""
    for p, q in zip(ours, theirs, strict=True):
        assert (p - q).norm() <= bound * q.norm()
        torch.testing.assert_close(p, q, rtol=3 * bound, atol=3 * bound)


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_hundred_steps(device, max_norm):
    ours, theirs = parameters(device)
    optimizer = AdamW(groups(ours), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.0, max_norm=max_norm)
    twin = torch.optim.AdamW(groups(theirs), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(100 if device == "cuda" else 12):
        set_gradients(ours, theirs, 10.0 ** (step % 5 - 3))
        if max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
        for group in (*optimizer.param_groups, *twin.param_groups):
            group["lr"] = 1e-2 / (1 + step)
        optimizer.step()
        twin.step()
        if max_norm is not None:
            torch.testing.assert_close(optimizer.grad_norm, norm, rtol=1e-6, atol=0)
    assert_equal_to(ours, theirs)


def test_more_parameters_than_one_launch_takes(device):
    ours, theirs = parameters(device, [(3, 2)] * (FAN + 3))
    optimizer = AdamW(ours, max_norm=0.5)
    twin = torch.optim.AdamW(theirs)
    set_gradients(ours, theirs)
    ours[4].grad = theirs[4].grad = ours[FAN].grad = theirs[FAN].grad = None
    torch.nn.utils.clip_grad_norm_(theirs, 0.5)
    optimizer.step()
    twin.step()
    assert_equal_to(ours, theirs)


def test_low_precision_copies(device):
    ours, theirs = parameters(device)
    optimizer = AdamW(ours, low=torch.bfloat16)
    set_gradients(ours, theirs)
    low = [optimizer.low_of(p) for p in ours]
    assert all(torch.equal(a, p.bfloat16()) for a, p in zip(low, ours, strict=True))
    optimizer.step()
    assert all(torch.equal(a, p.bfloat16()) for a, p in zip(low, ours, strict=True))
    with torch.no_grad():
        ours[1].fill_(3.0)
    optimizer.refresh_low()
    assert low[1].eq(3).all()


def test_state_dicts_go_to_torch_and_back(device):
    ours, theirs = parameters(device)
    optimizer, twin = AdamW(groups(ours)), torch.optim.AdamW(groups(theirs))
    for _ in range(3):
        set_gradients(ours, theirs)
        optimizer.step()
        twin.step()
    file = io.BytesIO()
    torch.save(twin.state_dict(), file)
    file.seek(0)
    fresh = [torch.nn.Parameter(q.detach().clone()) for q in theirs]
    resumed = AdamW(groups(fresh))
    resumed.load_state_dict(torch.load(file, weights_only=True))
    set_gradients(fresh, theirs)
    resumed.step()
    twin.step()
    assert_equal_to(fresh, theirs)
    state = copy.deepcopy(resumed.state_dict()["state"])  # torch would share the tensors
    back = torch.optim.AdamW(groups(theirs))
    back.load_state_dict({**twin.state_dict(), "state": state})
    set_gradients(fresh, theirs)
    resumed.step()
    back.step()
    assert_equal_to(fresh, theirs)


def test_equal_bits_every_time(device):
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        ours, theirs = parameters(device)
        optimizer = AdamW(ours, max_norm=1.0)
        for _ in range(2):
            set_gradients(ours, theirs)
            optimizer.step()
        results.append(torch.cat([p.detach().flatten() for p in ours]))
    assert torch.equal(*results)


def test_strided_gradients_and_nan(device):
    ours, theirs = parameters(device, [(6, 4)])
    optimizer, twin = AdamW(ours, max_norm=1.0), torch.optim.AdamW(theirs)
    ours[0].grad = torch.randn(4, 6, device=device).T
    theirs[0].grad = ours[0].grad.clone()
    torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    optimizer.step()
    twin.step()
    assert_equal_to(ours, theirs)
    ours[0].grad = torch.full((6, 4), float("nan"), device=device)
    optimizer.step()
    assert optimizer.grad_norm.isnan() and ours[0].isnan().all()  # in the open, as in torch


@pytest.mark.gpu
def test_a_captured_step_follows_learning_rate_and_count(device):
    if device != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    ours, theirs = parameters(device)
    optimizer, twin = AdamW(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2)
    set_gradients(ours, theirs)
    optimizer.step()
    twin.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for step in range(5):
        optimizer.set_lr(1e-2 / (step + 1))
        twin.param_groups[0]["lr"] = 1e-2 / (step + 1)
        graph.replay()
        twin.step()
    assert_equal_to(ours, theirs)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"lr": -1.0}, "argument 'lr': must not be negative, got -1.0"),
        ({"betas": (0.9, 1.0)}, "argument 'betas': must lie between 0 and 1"),
        ({"eps": -1e-8}, "argument 'eps': must not be negative"),
        ({"weight_decay": -0.1}, "argument 'weight_decay': must not be negative"),
        ({"max_norm": 0.0}, "argument 'max_norm': must be positive or None, got 0.0"),
    ],
)
def test_refused_options(device, options, match):
    with pytest.raises(KernelArgumentError, match=match):
        AdamW(parameters(device)[0], **options)


def test_refused_parameters(device):
    with pytest.raises(KernelArgumentError, match="argument 'params': dtype torch.bfloat16"):
        AdamW([torch.zeros(3, dtype=torch.bfloat16, device=device)])
    mixed = [torch.zeros(3, device=device), torch.zeros(3, device="meta")]
    with pytest.raises(KernelArgumentError, match="argument 'params': devices .* and meta"):
        AdamW(mixed)
    optimizer = AdamW([torch.zeros(3, device=device)])
    with pytest.raises(KernelArgumentError, match="give all groups to the constructor"):
        optimizer.add_param_group({"params": [torch.zeros(2, device=device)]})
    with pytest.raises(KernelArgumentError, match="no copies; construct AdamW"):
        optimizer.low_of(torch.zeros(3))
