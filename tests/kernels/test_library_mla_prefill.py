"""Gated MLA in its expanded form against fp64, and refused arguments."""

import pytest
import torch

from minitriton.kernels.attention import attention
from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.mla_prefill import mla_attention, mla_attention_reference

# relative rms: output, gradients of q, k_nope, k_shared and v, gradient of the gate
BOUNDS = {
    torch.float32: (1e-5, 2e-5, 2e-5),
    torch.bfloat16: (5e-3, 8e-3, 8e-3),
    torch.float16: (1e-3, 2e-3, 2e-3),
}


def relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    return ((out.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def inputs(shape, dtype, device, widths=(128, 64, 128), gate=torch.bfloat16):
    """q, k_nope, k_shared, v and perhaps a gate, for shape (batch, tokens, heads)."""
    nope, shared, values = widths
    sizes = [(*shape, nope + shared), (*shape, nope), (*shape[:2], shared), (*shape, values)]
    made = [torch.randn(size, device=device).to(dtype) for size in sizes]
    if gate is not None:
        made.append(2 * torch.randn(*shape, values, device=device).to(gate))
    return [x.requires_grad_() for x in made]


def angles(tokens, shared, device):
    angle = 6 * torch.rand(tokens, shared // 2, device=device)
    return angle.cos(), angle.sin()


def check(tensors, bounds=None, **options):
    """Output, lse and all gradients within bounds of fp64."""
    bounds = bounds or BOUNDS[tensors[0].dtype]
    exact = [x.detach().double().requires_grad_() for x in tensors]
    out, lse = mla_attention(*tensors, return_lse=True, **options)
    options = {k: v for k, v in options.items() if k != "out_dtype"}
    expected, expected_lse = mla_attention_reference(*exact, **options)
    assert out.is_contiguous() and relative(out, expected) < bounds[0]
    assert (lse - expected_lse).abs().max() < (2e-2 if "rope" in options else 1e-5)
    grad = torch.randn(out.shape, device=out.device).to(out.dtype)
    ours = torch.autograd.grad(out, tensors, grad)
    theirs = torch.autograd.grad(expected, exact, grad.double())
    for i, (mine, wanted, tensor) in enumerate(zip(ours, theirs, tensors, strict=True)):
        assert mine.dtype == tensor.dtype and mine.shape == tensor.shape
        if wanted.norm() < 1e-6:  # one key: softmax has no slope
            assert mine.norm() < 0.2  # one token: nothing but the rounding of `out`
        else:
            assert relative(mine, wanted) < bounds[1 + (i == 4)]
    return out


@pytest.mark.parametrize("tokens", [1, 17, 65])
def test_k3_widths(device, tokens):
    check(inputs((1, tokens, 2), torch.bfloat16, device))


def test_fp32_output(device):
    out = check(inputs((2, 34, 2), torch.bfloat16, device), out_dtype=torch.float32)
    assert out.dtype == torch.float32


def test_fp32_gate_of_fp16_and_none(device):
    tensors = inputs((1, 33, 1), torch.float16, device, (16, 3, 16), torch.float32)
    check(tensors)
    check(tensors[:4])


def test_rope_in_fp32(device):
    tensors = inputs((2, 20, 3), torch.float32, device, (40, 10, 24), torch.float32)
    cos, sin = angles(20, 10, device)
    check(tensors, rope=(cos, sin), scale=0.3)
    plain = mla_attention(*tensors, rope=(cos * 0 + 1, sin * 0))
    torch.testing.assert_close(plain, mla_attention(*tensors))


def test_rope_in_bf16(device):
    """Rotated q and k are rounded once more than in the reference."""
    check(inputs((1, 33, 2), torch.bfloat16, device), (8e-3, 1.2e-2, 8e-3),
          rope=angles(33, 64, device))  # fmt: skip


def test_packed_sequences(device):
    ends = torch.tensor([0, 0, 1, 34, 34, 70], device=device)
    tensors = inputs((1, 70, 2), torch.bfloat16, device)
    out = check(tensors, cu_seqlens=ends)
    q, k_nope, k_shared, v, gate = (x[:, 34:70] for x in tensors)
    assert torch.equal(out[:, 34:70], mla_attention(q, k_nope, k_shared, v, gate))


def test_is_attention_on_expanded_keys(device):
    q, k_nope, k_shared, v = inputs((1, 65, 2), torch.bfloat16, device, gate=None)
    keys = torch.cat([k_nope, k_shared[:, :, None].expand(1, 65, 2, 64)], -1)
    assert torch.equal(mla_attention(q, k_nope, k_shared, v), attention(q, keys, v))


def test_views_of_projections(device):
    """k_nope and v of one projection, k_shared behind the latent: read in place."""
    up = torch.randn(1, 33, 2, 256, device=device).bfloat16().requires_grad_()
    down = torch.randn(1, 33, 512 + 64, device=device).bfloat16().requires_grad_()
    q, *_, gate = inputs((1, 33, 2), torch.bfloat16, device)
    out = mla_attention(q, up[..., :128], down[..., 512:], up[..., 128:], gate)
    grad = torch.randn(1, 2, 33, 128, device=device).bfloat16().transpose(1, 2)
    ours = torch.autograd.grad(out, [q, up, down, gate], grad)
    exact = [x.detach().double().requires_grad_() for x in (q, up, down, gate)]
    q, up, down, gate = exact
    expected, _ = mla_attention_reference(q, up[..., :128], down[..., 512:], up[..., 128:], gate)
    theirs = torch.autograd.grad(expected, exact, grad.double())
    assert relative(out, expected) < 5e-3
    assert all(relative(a, b) < 8e-3 for a, b in zip(ours, theirs, strict=True))
    assert not ours[2][..., :512].any()


def test_runs_do_not_differ(device):
    tensors = inputs((1, 40, 3), torch.bfloat16, device)
    runs = []
    for _ in range(2):
        out = mla_attention(*tensors)
        runs.append((out, *torch.autograd.grad(out.float().square().sum(), tensors)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("shape", [(0, 5, 2), (2, 0, 2), (2, 5, 0)], ids=str)
def test_nothing_to_do(device, shape):
    tensors = inputs(shape, torch.float32, device, (16, 16, 16))
    out = mla_attention(*tensors, rope=angles(shape[1], 16, device))
    out.sum().backward()
    assert out.shape == (*shape, 16)
    assert all(x.grad.shape == x.shape and not x.grad.any() for x in tensors)


def test_operators_are_sound(device):
    tensors = inputs((1, 9, 2), torch.float32, device, (40, 10, 24), torch.float32)
    rest = (None, None, True, 0.25, 0.0, "tf32x3", torch.float32)
    torch.library.opcheck(torch.ops.minitriton.attention, (*tensors, *rest))
    q = tensors[0]
    torch.library.opcheck(torch.ops.minitriton.rotate, (q, *angles(9, 10, device), 40, 1.0))


def test_torch_compile_without_graph_breaks(device):
    tensors = inputs((1, 20, 2), torch.float32, device, (40, 10, 24), torch.float32)
    rope = angles(20, 10, device)
    compiled = torch.compile(
        lambda q, *others: mla_attention(q * 2, *others, rope=rope) * 3,
        fullgraph=True,
        backend="aot_eager",
    )
    out = compiled(*tensors)
    expected = mla_attention(tensors[0] * 2, *tensors[1:], rope=rope) * 3
    torch.testing.assert_close(out, expected)
    ours = torch.autograd.grad(out.square().sum(), tensors)
    theirs = torch.autograd.grad(expected.square().sum(), tensors)
    torch.testing.assert_close(ours, theirs)


TURN = (torch.ones(4, 4), torch.zeros(4, 4))


@pytest.mark.parametrize(
    ("change", "options", "match"),
    [
        (lambda q, k, s, v, g: (q[..., 0], k, s, v), {}, "argument 'q': shape .*must be"),
        (lambda q, k, s, v, g: (q, k[:, :1], s, v), {}, r"argument 'k_nope': .*\(1, 4, 2, any\)"),
        (lambda q, k, s, v, g: (q, k[..., :9], s, v), {}, "argument 'k_nope': 9 channels"),
        (lambda q, k, s, v, g: (q, q, s, v), {}, "argument 'k_nope': 24 channels leave none of"),
        (lambda q, k, s, v, g: (q, k, s[..., :4], v), {}, r"argument 'k_shared': .*\(1, 4, 8\)"),
        (lambda q, k, s, v, g: (q, k, s.half(), v), {}, "argument 'k_shared': dtype .*differs"),
        (lambda q, k, s, v, g: (q, k, s, v[0]), {}, r"argument 'v': .*\(1, 4, 2, any\)"),
        (lambda q, k, s, v, g: (q, k, s, v, g[..., :3]), {}, "argument 'gate': shape"),
        (lambda q, k, s, v, g: (q, k, s, v, g.to("meta")), {}, "argument 'gate': device meta"),
        (lambda q, k, s, v, g: (q, k, s, v, g.long()), {}, "argument 'gate': dtype torch.int64"),
        (None, {"rope": TURN[0]}, r"argument 'rope': must be a pair \(cos, sin\)"),
        (None, {"rope": (TURN[0], TURN[1][:2])}, r"argument 'rope sin': .*\(4, 4\)"),
        (None, {"rope": (TURN[0], TURN[1].clone().requires_grad_())}, "argument 'rope'.*gradient"),
        (None, {"scale": 0.0}, "argument 'scale': must be a positive number"),
        (None, {"out_dtype": "bf16"}, "argument 'out_dtype': 'bf16'"),
        (None, {"cu_seqlens": torch.tensor([0, 3])}, "argument 'cu_seqlens': runs from 0"),
    ],
)
def test_refused_before_launch(device, change, options, match):
    made = inputs((1, 4, 2), torch.float32, device, (16, 8, 16), torch.float32)
    tensors = [x.detach() for x in made]
    options = {
        k: tuple(x.to(device) for x in v) if isinstance(v, tuple) else v for k, v in options.items()
    }
    with pytest.raises(KernelArgumentError, match=match):
        mla_attention(*(change(*tensors) if change else tensors), **options)
