"""MXFP4 to the bit, experts with MXFP4 weights against fp64, as torch operators, and refusals."""

import pytest
import torch

from minitriton.kernels import moe_w4a8
from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.moe_experts import local_experts, moe_experts_reference
from minitriton.kernels.moe_mxfp4 import moe_experts_mxfp4
from minitriton.kernels.moe_routing import moe_route_reference
from minitriton.kernels.mxfp4 import (
    mxfp4_dequantize,
    mxfp4_dequantize_reference,
    mxfp4_quantize,
    mxfp4_quantize_reference,
)
from minitriton.kernels.situ import situ_glu_reference

TIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])


def relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    return ((out.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize("rule", ["ceil", "ocp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_quantize(device, dtype, rule):
    w = torch.randn(3, 35, 32) * torch.exp2(torch.randint(-12, 12, (3, 35, 1)).float())
    w[0, 0] = 0
    w[1, 1], w[2, 2] = 0, 0
    w[1, 1, :8], w[2, 2, 24:] = TIES, -TIES
    w = w.to(device, dtype)
    for x in (w, w.transpose(0, 1)[:7, 1:], w[:0]):
        packed, scales = mxfp4_quantize(x, rule)
        expected = mxfp4_quantize_reference(x, rule)
        assert torch.equal(packed, expected[0]) and torch.equal(scales, expected[1])
    values = mxfp4_dequantize(*mxfp4_quantize(w, rule))
    again = mxfp4_quantize(values, rule)
    assert torch.equal(mxfp4_dequantize(*again), values)


def test_known_bytes(device):
    w = torch.zeros(32, device=device)
    w[:8] = TIES.to(device)  # codes 0, 2, 2, 4, 4, 6, 6, 7: ties go to the even code
    packed, scales = mxfp4_quantize(w)
    assert packed.tolist() == [0x20, 0x42, 0x64, 0x76] + [0] * 12 and scales.tolist() == [127]
    packed, scales = mxfp4_quantize(-7 * w.sign())
    assert packed[:4].tolist() == [0xEE] * 4 and scales.tolist() == [
        128
    ]  # -3.5 goes to -4, times 2
    packed, scales = mxfp4_quantize(-7 * w.sign(), "ocp")
    assert packed[:4].tolist() == [0xFF] * 4 and scales.tolist() == [127]  # saturates at -6
    assert mxfp4_quantize(torch.full((32,), 1e-45, device=device))[1].tolist() == [5]


def test_dequantize_all_codes_and_scales(device):
    packed = torch.arange(256, dtype=torch.uint8, device=device).view(1, 16, 16).repeat(255, 1, 1)
    scales = torch.arange(255, dtype=torch.uint8, device=device).view(255, 1, 1).repeat(1, 16, 1)
    exact = mxfp4_dequantize_reference(packed, scales)
    assert torch.equal(mxfp4_dequantize(packed, scales, torch.float32), exact.float())
    assert torch.equal(mxfp4_dequantize(packed[8:], scales[8:]), exact[8:].bfloat16())
    middle = slice(115, 135)
    half = mxfp4_dequantize(packed[middle], scales[middle], torch.float16)
    assert torch.equal(half, exact[middle].half())


def layer(tokens, experts, k, latent, ff, tile_rows, device, allowed=None):
    """(z, w13, its scales, w2, its scales, routing); `allowed`: only these experts are chosen."""
    logits = torch.randn(tokens, experts) + 1.5 * torch.randn(experts)
    if allowed is not None:
        logits[:, [e for e in range(experts) if e not in allowed]] -= 100
    routing = moe_route_reference(logits, None, k, tile_rows=tile_rows)
    routing = type(routing)(*(x.to(device) for x in routing))
    w13 = torch.randn(experts, 2 * ff, latent, device=device) * 2 / latent**0.5
    w2 = torch.randn(experts, latent, ff, device=device) / ff**0.5
    z = torch.randn(tokens, latent, device=device).bfloat16()
    return z, *mxfp4_quantize(w13), *mxfp4_quantize(w2), routing


def expected_of(z, w13, w13_scales, w2, w2_scales, routing, **betas):
    weights = [mxfp4_dequantize_reference(*x) for x in ((w13, w13_scales), (w2, w2_scales))]
    return moe_experts_reference(z.double(), *weights, routing, **betas)


@pytest.mark.parametrize(
    ("shape", "target"),
    [
        ((9, 4, 2, 160, 96, 16), "sm_90a"),
        ((36, 2, 2, 96, 64, 64), "sm_80"),
        ((36, 2, 2, 96, 64, 64), "sm_90a"),
        ((50, 2, 1, 96, 64, 128), "sm_90a"),
        ((1, 5, 2, 160, 96, 16), "sm_80"),
        ((9, 3, 3, 32, 32, 16), "sm_90a"),
    ],
    ids=str,
)
def test_experts(device, shape, target, monkeypatch):
    if device == "cpu":
        monkeypatch.setenv("MINITRITON_TARGET", target)
    operands = layer(*shape, device)
    out = moe_experts_mxfp4(*operands)
    assert out.dtype == torch.bfloat16 and out.is_contiguous()
    assert relative(out, expected_of(*operands)) < 5e-3
    assert torch.equal(out, moe_experts_mxfp4(*operands))


@pytest.fixture
def rounded(monkeypatch):
    """What `moe_w4a8.quantise` gave: fp64 values of each call."""
    values, quantise = [], moe_w4a8.quantise

    def record(*arguments):
        q, scale = quantise(*arguments)
        values.append(q.double() * scale.double()[:, None])
        return q, scale

    monkeypatch.setattr(moe_w4a8, "quantise", record)
    return values


def in_order(channels, device):
    """Channels at the positions of fp8 activations: a word of each block, its even codes first."""
    codes = torch.arange(channels, device=device).view(-1, 4, 4, 4, 2)  # 128: block, word, code
    return codes.permute(0, 2, 4, 1, 3).reshape(-1)


@pytest.mark.parametrize(
    ("shape", "target"),
    [
        ((9, 3, 2, 256, 128, 16), "sm_80"),
        ((9, 3, 2, 256, 128, 16), "sm_90a"),
        ((36, 2, 2, 128, 128, 64), "sm_90a"),
        ((50, 2, 1, 128, 256, 128), "sm_90a"),
    ],
    ids=str,
)
def test_fp8_activations(device, shape, target, rounded, monkeypatch):
    """Exact but for the rounding of tokens and activations, whose error is as large as expected."""
    if device == "cpu":
        monkeypatch.setenv("MINITRITON_TARGET", target)
    z, w13, s13, w2, s2, routing = operands = layer(*shape, device)
    out = moe_experts_mxfp4(*operands, activations="fp8")
    assert relative(out, expected_of(*operands)) < 6e-2
    latent, ff = z.shape[1], w2.shape[2] * 2
    zq, act = rounded[0][:, in_order(latent, device).argsort()], rounded[1]
    assert relative(zq, z.double()) < 3e-2
    rows = routing.row_of_slot.long()  # [T, k]
    w13, w2 = mxfp4_dequantize_reference(w13, s13), mxfp4_dequantize_reference(w2, s2)
    h = torch.einsum("tl,tkol->tko", zq, w13[routing.experts.long()])
    exact = situ_glu_reference(*h.bfloat16().double().chunk(2, -1))[..., in_order(ff, device)]
    assert relative(act[rows], exact) < 3e-2
    w2 = w2[routing.experts.long()][..., in_order(ff, device)]
    y = torch.einsum("tkf,tklf->tkl", act[rows], w2)
    assert relative(out, (y * routing.weights.double()[..., None]).sum(1)) < 5e-3
    assert torch.equal(out, moe_experts_mxfp4(*operands, activations="fp8"))


def test_fp8_activations_with_extreme_scales(device):
    """A block of zeros may have any scale; rows of zeros and of large tokens."""
    z, w13, s13, w2, s2, routing = layer(9, 3, 3, 128, 128, 16, device)
    s13, s2 = s13 - 40, s2 + 80
    s2[:, :, 1], w2[:, :, 16:32] = 255, 0
    exact = s2.clone()
    exact[:, :, 1] = 127
    z[0], z[1] = 0, z[1] * 2**40
    out = moe_experts_mxfp4(z, w13, s13, w2, s2, routing, activations="fp8")
    expected = expected_of(z, w13, s13, w2, exact, routing)
    assert relative(out[1:2], expected[1:2]) < 6e-2 and relative(out[2:], expected[2:]) < 6e-2
    assert out[0].abs().max() == 0


@pytest.mark.parametrize("apart", [0, 26, 27, 120])
def test_fp8_activations_with_distant_scales(device, apart):
    """The only block that meets anything but zeros has the smallest scale: it counts in full."""
    z, w13, s13, w2, s2, routing = layer(9, 3, 3, 256, 128, 16, device)
    z[:, :96], z[:, 128:], s2[:, :, 0] = 0, 0, 10
    w13[:, :32], w13[:, 64:160], w13[:, 192:] = 0, 0, 0  # activations: of the second block alone
    s13[:, :, :3], s13[:, 64:, 4:], s2[:, 5:, 0] = 120 + apart, 120 + apart, 120 + apart
    out = moe_experts_mxfp4(z, w13, s13, w2, s2, routing, activations="fp8")
    assert relative(out, expected_of(z, w13, s13, w2, s2, routing)) < 6e-2


def test_some_experts_without_tokens_uncapped(device):
    operands = layer(9, 4, 2, 160, 96, 16, device, allowed=(1, 3))
    out = moe_experts_mxfp4(*operands, beta1=1.0, beta2=None)
    assert relative(out, expected_of(*operands, beta1=1.0, beta2=None)) < 5e-3


def test_norm_of_the_sum(device):
    operands = layer(9, 4, 2, 160, 96, 16, device)
    norm = 1 + 0.2 * torch.randn(160, device=device)
    out = moe_experts_mxfp4(*operands, norm_weight=norm)
    assert relative(out, expected_of(*operands, norm_weight=norm.double())) < 5e-3


def test_extreme_scales(device):
    """Large and small scale bytes, and those that no weight uses."""
    z, w13, s13, w2, s2, routing = layer(9, 3, 3, 32, 32, 16, device)
    s13, s2 = s13 - 8, s2 + 40
    s2[0], w2[0] = 255, 0  # 0 times anything
    s2[1] = 3  # flushed to zero
    exact = s2.clone()
    exact[0] = 127
    out = moe_experts_mxfp4(z, w13, s13, w2, s2, routing)
    assert relative(out, expected_of(z, w13, s13, w2, exact, routing)) < 5e-3


def test_slices_of_the_experts_add_up(device):
    z, *weights, routing = layer(9, 3, 3, 32, 32, 16, device)
    parts = [
        moe_experts_mxfp4(z, *(x[a:b] for x in weights), local_experts(routing, a, b - a)).double()
        for a, b in ((0, 2), (2, 3))
    ]
    assert relative(sum(parts), expected_of(z, *weights, routing)) < 7e-3


def test_no_tokens(device):
    assert moe_experts_mxfp4(*layer(0, 3, 2, 32, 32, 16, device)).shape == (0, 32)


def test_operators_are_sound(device):
    ops = torch.ops.minitriton
    for size, fp8 in ((32, False), (128, True)):
        z, w13, s13, w2, s2, r = layer(9, 3, 3, size, size, 16, device)
        tables = (r.weights, r.row_of_slot, r.token_of_row, r.expert_of_tile)
        operands = (z, w13, s13, w2, s2, *tables, 4.0, None, None, 1.0, fp8)
        torch.library.opcheck(ops.moe_experts_mxfp4, operands)
    torch.library.opcheck(ops.mxfp4_quantize, (torch.randn(3, 64, device=device), True))
    torch.library.opcheck(ops.mxfp4_dequantize, (w13, s13, torch.float32))


def test_torch_compile_without_graph_breaks(device):
    z, w13, s13, *_, routing = layer(9, 3, 3, 32, 32, 16, device)
    fresh = torch.randn(3, 32, 32, device=device)

    def quantized(z, w):
        return moe_experts_mxfp4(z * 2, w13, s13, *mxfp4_quantize(w), routing) + z

    out = torch.compile(quantized, fullgraph=True, backend="aot_eager")(z, fresh)
    torch.testing.assert_close(out, quantized(z, fresh))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: mxfp4_quantize(torch.zeros(4, 48)), r"'w': shape \(4, 48\); .* multiple of 32"),
        (lambda: mxfp4_quantize(torch.zeros(32).int()), "'w': dtype torch.int32"),
        (lambda: mxfp4_quantize(torch.zeros(32), "floor"), "'rule': 'floor'; it must be one of"),
        (lambda: mxfp4_quantize(torch.zeros(32, requires_grad=True)), "'w': requires_grad"),
        (lambda: mxfp4_dequantize(torch.zeros(16), torch.zeros(1)), "'packed': expected a uint8"),
        (lambda: mxfp4_dequantize(torch.zeros(16).byte(), torch.zeros(2).byte()),
         r"'scales': shape \(2,\) on cpu; 'packed', shape \(16,\)"),
        (lambda: mxfp4_dequantize(torch.zeros(16).byte(), torch.zeros(1).byte(), torch.float64),
         "'dtype': torch.float64; it must be"),
    ],
)  # fmt: skip
def test_refused_codes(call, match):
    with pytest.raises(KernelArgumentError, match=match):
        call()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda z, a, b, c, d, r: (z.float(), a, b, c, d, r), "'z': it must be a .* bfloat16"),
        (lambda z, a, b, c, d, r: (z[:, 1:], a, b, c, d, r), r"'w13': shape \(3, 64, 16\); .* 15"),
        (lambda z, a, b, c, d, r: (z, a[:, 1:], b[:, 1:], c, d, r), "'w13': .* a multiple of 32"),
        (lambda z, a, b, c, d, r: (z, a, b[..., :0], c, d, r), r"'w13_scales': shape \(3, 64, 0\)"),
        (lambda z, a, b, c, d, r: (z, a.int(), b, c, d, r), "'w13': expected a uint8 tensor"),
        (lambda z, a, b, c, d, r: (z, a, b, c[:, 1:], d[:, 1:], r), r"'w2': .*\(3, 32, 16\)"),
        (lambda z, a, b, c, d, r: (z, a.mT.contiguous().mT, b, c, d, r),
         "'w13': it must be contiguous"),
        (lambda z, a, b, c, d, r: (z, a, b, c, d, None), "'routing': expected a Routing"),
        (lambda z, a, b, c, d, r: (z.requires_grad_(), a, b, c, d, r), "'z': requires a gradient"),
        (lambda z, a, b, c, d, r: (z, a, b, c, d, r, r.weights.requires_grad_()),
         "'weights': requires a gradient, but this function has no backward pass"),
    ],
)  # fmt: skip
def test_refused_before_launch(device, change, match):
    with pytest.raises(KernelArgumentError, match=match):
        moe_experts_mxfp4(*change(*layer(9, 3, 3, 32, 32, 16, device)))


@pytest.mark.parametrize(
    ("activations", "latent", "match"),
    [
        ("int8", 32, "'activations': 'int8'; it must be 'bf16' or 'fp8'"),
        ("fp8", 96, "'activations': 'fp8' needs latent and ff multiples of 128, not 96 and 128"),
    ],
)
def test_refused_activations(device, activations, latent, match):
    with pytest.raises(KernelArgumentError, match=match):
        moe_experts_mxfp4(*layer(9, 3, 3, latent, 128, 16, device), activations=activations)
