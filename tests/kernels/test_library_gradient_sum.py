"""Gradient accumulation: sums over several backward passes, refused parameters."""

import pytest
import torch

from minitriton.kernels.adamw import AdamW
from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.chunks import CHUNK, FAN
from minitriton.kernels.gradient_sum import GradientSum

SHAPES = [(CHUNK + 5, 2), (3,), (), (7, 11)]


def make(shapes, device):
    return [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]


def test_sums_in_the_order_of_the_calls(device):
    params = make(SHAPES + [(2,)] * FAN, device)
    sums = GradientSum(params)
    for _ in range(2):  # the second round begins anew
        expected = [torch.zeros_like(p) for p in params]
        for call in range(3):
            for i, p in enumerate(params):
                p.grad = None
                if (i + call) % 5:  # strides of any kind, and sometimes nothing
                    p.grad = torch.randn_like(p.mT).mT if p.dim() == 2 else torch.randn_like(p)
                    expected[i] += p.grad
            sums.add()
            assert all(p.grad is None for p in params)
        sums.give()
        for p, wanted in zip(params, expected, strict=True):
            assert torch.equal(p.grad, wanted)


def test_adamw_steps_on_the_sums(device):
    """As torch's, whose autograd adds; all sums are views of the one buffer to be exchanged."""
    ours, theirs = (
        [torch.nn.Parameter(torch.ones(5, 3, device=device) * i) for i in (1, 2)] for _ in range(2)
    )
    sums, optimizer = GradientSum(ours), AdamW(ours, lr=0.1, max_norm=1.0)
    other = torch.optim.AdamW(theirs, lr=0.1)
    for _ in range(2):
        for _ in range(3):
            grads = [torch.randn(5, 3, device=device) for _ in ours]
            for p, q, grad in zip(ours, theirs, grads, strict=True):
                p.grad = grad
                q.grad = grad.clone() if q.grad is None else q.grad + grad
            sums.add()
        sums.give()
        start, end = sums.flat.data_ptr(), sums.flat.data_ptr() + 4 * sums.flat.numel()
        assert all(start <= p.grad.data_ptr() < end for p in ours)
        optimizer.step()
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        other.step()
        other.zero_grad()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), atol=1e-6, rtol=1e-6)


def test_refused_parameters(device):
    for params, words in (
        ([], "no parameters"),
        ([torch.nn.Parameter(torch.ones(2, device=device).bfloat16())], "torch.bfloat16"),
    ):
        with pytest.raises(KernelArgumentError, match=f"argument 'params': .*{words}"):
            GradientSum(params)
