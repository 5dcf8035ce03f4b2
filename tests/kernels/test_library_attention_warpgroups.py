"""Attention in the tiles that it takes where products run on warpgroups (wgmma, sm_90a)."""

import pytest
import torch

from minitriton.jit import compile_hooks
from minitriton.kernels import attention_forward
from minitriton.kernels.attention import attention, attention_reference
from minitriton.kernels.attention_packed import packed_attention, packed_attention_reference
from minitriton.kernels.mla_prefill import mla_attention, mla_attention_reference

DROPPED = {"dropout": 0.2, "seed": 5}
PACKED = {"cu_seqlens": torch.tensor([0, 66, 66, 190], dtype=torch.int32)}
SQUARE = ((1, 190, 2, 64),) * 3
KEYS = ((1, 130, 1, 128),) * 2
WIDE = ((1, 190, 1, 128),) * 3
CASES = {  # functions, shapes of the arguments, options, keys from which v comes an iteration later
    "64": (attention, SQUARE, {}, 64),
    "64, short": (attention, SQUARE, {}, 1024),
    "64, dropout": (packed_attention, ((1, 130, 192),), {"heads": 1, **DROPPED}, 64),
    "128": (attention, WIDE, {}, 64),
    "128, all keys": (attention, ((1, 70, 1, 128), *KEYS), {"causal": False}, 64),
    "128, packed": (attention, WIDE, PACKED, 64),
    "128, dropout": (attention, WIDE, DROPPED, 64),
    "128, groups": (attention, ((1, 70, 4, 128), *KEYS), {}, 64),
    "mla": (mla_attention, ((1, 190, 1, 192), WIDE[0], (1, 190, 64), WIDE[0], WIDE[0]), {}, 64),
    "96 + 32": (attention, ((1, 70, 1, 96),) * 3, {}, 64),
}
REFERENCES = {
    attention: attention_reference,
    packed_attention: packed_attention_reference,
    mla_attention: mla_attention_reference,
}


pytestmark = pytest.mark.usefixtures("hopper")


@pytest.mark.parametrize("case", CASES)
def test_warpgroup_tiles(device, case, monkeypatch):
    """Result and gradients, and that all products are wgmma."""
    function, shapes, options, long = CASES[case]
    monkeypatch.setattr(attention_forward, "LONG", long)
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
    assert not any("mma.sync" in kernel.asm["ptx"] for kernel in made)
