"""Attention in the tiles that it takes where products run on warpgroups (wgmma, sm_90a)."""

import re

import pytest
import torch

from minitriton.jit import compile_hooks
from minitriton.kernels import attention_backward, attention_forward
from minitriton.kernels.attention import attention, attention_reference
from minitriton.kernels.attention_backward_tiles import Tile, Tiles
from minitriton.kernels.attention_packed import packed_attention, packed_attention_reference
from minitriton.kernels.mla_prefill import mla_attention, mla_attention_reference

DROPPED = {"dropout": 0.2, "seed": 5}
PACKED = {"cu_seqlens": torch.tensor([0, 66, 66, 190], dtype=torch.int32)}
SQUARE = ((1, 190, 2, 64),) * 3
KEYS = ((1, 130, 1, 128),) * 2
WIDE = ((1, 190, 1, 128),) * 3
CASES = {  # functions, shapes of the arguments, options
    "64": (attention, SQUARE, {}),
    "64, dropout": (packed_attention, ((1, 130, 192),), {"heads": 1, **DROPPED}),
    "128": (attention, WIDE, {}),
    "128, all keys": (attention, ((1, 70, 1, 128), *KEYS), {"causal": False}),
    "128, few keys": (attention, ((1, 270, 1, 128), *KEYS), {}),
    "128, packed": (attention, WIDE, PACKED),
    "128, dropout": (attention, WIDE, DROPPED),
    "128, groups": (attention, ((1, 70, 4, 128), *KEYS), {}),
    "mla": (mla_attention, ((1, 190, 1, 192), WIDE[0], (1, 190, 64), WIDE[0], WIDE[0]), {}),
    "96 + 32": (attention, ((1, 70, 1, 96),) * 3, {}),
    "256": (attention, ((1, 190, 1, 256),) * 3, {}),
    "256, all keys": (attention, ((1, 70, 1, 256), *((1, 130, 1, 256),) * 2), {"causal": False}),
    "256, packed": (attention, ((1, 190, 1, 256),) * 3, PACKED),
    "256, dropout": (attention, ((1, 130, 1, 256),) * 3, DROPPED),
    "256, groups": (attention, ((1, 70, 2, 256), *((1, 130, 1, 256),) * 2), {}),
    "192 and 256": (attention, ((1, 130, 1, 192), (1, 130, 1, 192), (1, 130, 1, 256)), {}),
}
PRODUCED = {"256", "256, groups"}  # a producer warp copies for all kernels of the way back
REFERENCES = {
    attention: attention_reference,
    packed_attention: packed_attention_reference,
    mla_attention: mla_attention_reference,
}


BACKWARD = ("_dkdv_kernel", "_dq_kernel")

pytestmark = pytest.mark.usefixtures("hopper")


@pytest.mark.parametrize("case", CASES)
def test_warpgroup_tiles(device, case):
    """Result and gradients, that all products are wgmma, and who copies for them."""
    function, shapes, options = CASES[case]
    made: list = []
    compile_hooks.append(made.append)
    inputs = [torch.randn(s, device=device).bfloat16().requires_grad_() for s in shapes]
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    out = function(*inputs, **options)
    grad = torch.randn_like(out)
    ours = (out, *torch.autograd.grad(out, inputs, grad))
    compile_hooks.remove(made.append)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = REFERENCES[function](*wide, **options)
    expected = expected[0] if isinstance(expected, tuple) else expected
    theirs = (expected, *torch.autograd.grad(expected, wide, grad.double()))
    for mine, right in zip(ours, theirs, strict=True):
        assert ((mine.double() - right).norm() / right.norm()).item() < 5e-3
    if case == "256, dropout":  # the way forward has no registers left for that
        made = [kernel for kernel in made if kernel.name != "_forward_kernel"]
    assert not any("mma.sync" in kernel.asm["ptx"] for kernel in made)
    if case in PRODUCED:  # of those compiled here, not by an earlier test
        backward = [kernel for kernel in made if kernel.name in BACKWARD]
        assert all(": warp specialised" in kernel.metadata["remarks"] for kernel in backward)


class Recorder:
    """Launches a kernel and keeps what was compiled."""

    def __init__(self, kernel):
        self.kernel, self.compiled = kernel, None

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.compiled = self.kernel[grid](*args, **options)

        return launch


def test_tiles_that_take_all_memory(device, monkeypatch):
    """Some have one slot where others have two, and the gradients go out through them."""
    wide = Tiles(Tile(64, 128, 8, 2), Tile(128, 64, 8, 2), Tile(96, 128, 8, 2))
    monkeypatch.setattr(attention_backward, "choose", lambda plan, size: wide)
    recorders = [Recorder(getattr(attention_backward, name)) for name in BACKWARD]
    for name, recorder in zip(BACKWARD, recorders, strict=True):
        monkeypatch.setattr(attention_backward, name, recorder)
    inputs = [torch.randn(1, 330, 1, 256, device=device).bfloat16() for _ in range(4)]
    *tensors, grad = [x.requires_grad_() for x in inputs]
    ours = torch.autograd.grad(attention(*tensors), tensors, grad)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    theirs = torch.autograd.grad(attention_reference(*exact)[0], exact, grad.double())
    for mine, right in zip(ours, theirs, strict=True):
        assert ((mine.double() - right).norm() / right.norm()).item() < 5e-3
    for recorder in recorders:
        remarks = recorder.compiled.metadata["remarks"]
        assert "a producer warp copies 2 and 1 stages by TMA" in remarks
        assert "not persistent: what it stores takes the memory of its slots" in remarks


@pytest.mark.parametrize("causal", [True, False])
def test_unmasked_loop(device, causal, monkeypatch):
    """Keys that all queries see meet no mask; without a causal mask programs share CTAs."""
    recorder = Recorder(attention_forward._forward_kernel)
    monkeypatch.setattr(attention_forward, "_forward_kernel", recorder)
    attention(*(torch.randn(1, 256, 1, 128, device=device).bfloat16(),) * 3, causal=causal)
    between = recorder.compiled.asm["tile"].split("mt.warpgroup_dot")  # two in each of two loops
    assert len(between) == 5
    masks = [re.search("arith.select .*tensor<", text) for text in (between[1], between[3])]
    assert masks[0] is None and masks[1] is not None
    remarks = recorder.compiled.metadata["remarks"]
    assert ("persistent: each CTA" in remarks) == (not causal)
    assert "store by TMA" in remarks
