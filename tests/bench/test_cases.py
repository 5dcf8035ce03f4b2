"""The cases themselves: their references, the configurations they try, and the peers they call."""

import sys
import types

import pytest
import torch

from minitriton.bench import catalog, worker
from minitriton.bench.cases import Setting, build
from minitriton.bench.cases_products import DEEP, ODD, SHALLOW, _configs
from minitriton.bench.cases_recurrent import chunked_reference
from minitriton.bench.catalog import Spec
from minitriton.kernels import chunk_kda_reference

CPU = Setting(device="cpu")


@pytest.mark.parametrize("tokens", [5, 8, 21])
def test_the_chunked_delta_rule(tokens):
    """Against the library's reference, token by token, with its gradients."""
    shape = (2, tokens, 3, 4)
    q, k, v = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3))
    g = (-5 * torch.rand(shape, dtype=torch.float64)).requires_grad_()
    beta = torch.rand(shape[:3], dtype=torch.float64, requires_grad=True)
    inputs = [q, k, v, g, beta]
    grad = torch.randn(shape, dtype=torch.float64)
    found = chunked_reference(*inputs, chunk=8)
    wanted, _ = chunk_kda_reference(*inputs, scale=1.0)
    torch.testing.assert_close(found, wanted)
    for a, b in zip(
        torch.autograd.grad(found, inputs, grad),
        torch.autograd.grad(wanted, inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_strong_decays_over_whole_chunks():
    """e^-G of 64 tokens at the gate's floor lies within fp64."""
    q, k, v = (torch.randn(1, 128, 1, 4, dtype=torch.float64) for _ in range(3))
    g, beta = torch.full_like(q, -5.0), torch.rand(1, 128, 1, dtype=torch.float64)
    wanted, _ = chunk_kda_reference(q, k, v, g, beta, scale=1.0)
    torch.testing.assert_close(chunked_reference(q, k, v, g, beta), wanted)


def test_configurations_by_depth():
    """Quick runs try the first few: ping-pong tiles first where K is small."""
    assert sorted(DEEP) == sorted(SHALLOW)
    first = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 6}
    assert _configs(CPU, 8192, 8192, 1024, 2)[0] == first
    assert _configs(CPU, 8192, 8192, 8192, 2)[0]["num_warps"] == 8
    quick = Setting(device="cpu", quick=True)
    assert first in _configs(quick, 8192, 8192, 8192, 2)
    assert len(_configs(quick, 8192, 8192, 8192, 2)) == 4


def test_both_compilers_try_the_same_and_ours_more():
    """Tiles beyond powers of two are those of a column of their own."""
    sizes = {"m": 256, "n": 256, "k": 64, "b_nk": False, "dtype": "bf16"}
    case = build(Spec("matmul", "t", "products", "matmul", sizes), CPU)
    ours = [trial.label for trial in case.contenders["minitriton"]()]
    assert len(ours) == len(DEEP) and not any("192" in label for label in ours)
    odd = [trial.label for trial in case.contenders["minitriton 192"]()]
    assert len(odd) == len(ODD) and all("x192x" in label for label in odd)
    sizes["m"] = 16
    case = build(Spec("matmul_skinny", "t", "products", "matmul", sizes), CPU)
    assert "minitriton 192" not in case.contenders


def left_out(case, name):
    events = []
    worker.run_case(
        case, None, worker.Effort(), lambda event, **more: events.append({"event": event, **more}),
        skip=set(case.contenders) - {name},
    )  # fmt: skip
    return {e["event"]: e for e in events}


PEERS = {"fla": ("kda", "kda_backward", "kda_decode", "short_conv", "short_conv_backward",
                 "gated_rms_norm", "gated_rms_norm_backward", "attn_res", "attn_res_backward"),
         "liger": ("softmax", "layer_norm", "layer_norm_backward", "rms_norm", "rms_norm_backward",
                   "swiglu", "swiglu_backward", "cross_entropy", "cross_entropy_backward",
                   "cross_entropy_step", "attn_res", "attn_res_backward")}  # fmt: skip


def tiny(family, setting):
    """A case of the dry run's size with the contenders of a timed run."""
    (spec,) = catalog.select("dry", [family])
    return build(spec, setting)


@pytest.mark.parametrize("name", PEERS)
def test_peers_that_are_not_installed_are_named(name, monkeypatch):
    for module in ("fla", "liger_kernel"):
        monkeypatch.setitem(sys.modules, module, None)
    for family in PEERS[name]:
        case = tiny(family, CPU)
        event = left_out(case, name)["left_out"]
        assert not event["failed"], family
        assert any(why in event["reason"] for why in ("fla", "liger", "one tensor")), family


def test_fla_tunes_itself_in_full_runs_only():
    case = tiny("kda", Setting(device="cpu", quick=True))
    assert "full runs only" in left_out(case, "fla")["left_out"]["reason"]


class Swiglu(torch.autograd.Function):
    """Writes the gradients over its inputs, as liger's does."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.pair = a.detach(), b.detach()
        return torch.nn.functional.silu(a) * b

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.pair
        wide = [x.float().requires_grad_() for x in (a, b)]
        with torch.enable_grad():
            out = torch.nn.functional.silu(wide[0]) * wide[1]
        found = torch.autograd.grad(out, wide, grad.float())
        return a.copy_(found[0]), b.copy_(found[1])


class Loss(torch.autograd.Function):
    """Its forward pass writes the gradient over the logits, as liger's does."""

    @staticmethod
    def forward(ctx, x, targets):
        wide = x.detach().float().requires_grad_()
        with torch.enable_grad():
            loss = torch.nn.functional.cross_entropy(wide, targets)
        if x.requires_grad:
            x.detach().copy_(torch.autograd.grad(loss, wide)[0])
        ctx.save_for_backward(x.detach())
        return loss.detach()

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0], None


@pytest.fixture
def liger(monkeypatch):
    """Stands in for liger-kernel, with torch's functions and liger's habits."""
    module = types.ModuleType("liger_kernel.transformers.functional")
    module.liger_softmax = lambda x: torch.softmax(x, -1)
    module.liger_layer_norm = lambda x, w, b, eps: torch.nn.functional.layer_norm(
        x, w.shape, w, b, eps
    )
    module.liger_rms_norm = lambda x, w, eps, in_place: torch.nn.functional.rms_norm(
        x, w.shape, w, eps
    )
    module.liger_swiglu = Swiglu.apply
    module.liger_cross_entropy = Loss.apply
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_liger(liger):
    """Functions that overwrite what they are given disturb neither the others nor the check."""
    for family in PEERS["liger"][:-2]:
        events = left_out(tiny(family, CPU), "liger")
        if family == "cross_entropy_backward":
            assert "cross_entropy_step" in events["left_out"]["reason"]
        else:
            assert events["result"]["error"] < 1e-2, family
