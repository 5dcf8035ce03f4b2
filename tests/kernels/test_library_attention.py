"""Flash attention against fp64, its dropout, packed sequences, and refused arguments."""

import pytest
import torch

from minitriton.kernels import attention_backward_tiles as tiles
from minitriton.kernels.attention import (
    attention,
    attention_dropout_mask,
    attention_reference,
)
from minitriton.kernels.checks import KernelArgumentError
from tests.kernels.test_warp_split import once

# these kernels take long in the emulator: once, with copies that land at random
pytestmark = [once, pytest.mark.usefixtures("at_random")]

# relative rms: output, gradients of q, k and v; absolute: lse
BOUNDS = {
    torch.float32: (1e-5, 2e-5, 1e-5),
    torch.bfloat16: (4e-3, 6e-3, 1e-5),
    torch.float16: (1e-3, 1e-3, 1e-5),
}


def relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    return ((out.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def inputs(shape, dtype, device, keys=None, values=None, shared=1):
    """q, k, v for shape (batch, queries, heads, channels); `shared` heads of q to one of k."""
    batch, queries, heads, width = shape
    keys, few = queries if keys is None else keys, heads // shared
    sizes = [(queries, heads, width), (keys, few, width), (keys, few, values or width)]
    made = [torch.randn(batch, *size, device=device) for size in sizes]
    return [x.to(dtype).requires_grad_() for x in made]


def check(tensors, bounds=None, grad=None, **options):
    """Output, lse and gradients of both within bounds of fp64."""
    bounds = bounds or BOUNDS[tensors[0].dtype]
    exact = [x.detach().double().requires_grad_() for x in tensors]
    out, lse = attention(*tensors, return_lse=True, **options)
    options = {k: v for k, v in options.items() if k not in ("precision", "out_dtype")}
    expected, expected_lse = attention_reference(*exact, **options)
    assert relative(out, expected) < bounds[0]
    blind = expected_lse.isinf()
    assert (lse[blind] == -float("inf")).all()
    assert lse.shape == expected_lse.shape and lse.dtype == torch.float32
    torch.testing.assert_close(lse[~blind].double(), expected_lse[~blind], atol=bounds[2], rtol=0)
    grad = torch.randn(out.shape, device=out.device).to(out.dtype) if grad is None else grad
    dlse = torch.randn(lse.shape, device=lse.device)
    ours = torch.autograd.grad([out, lse], tensors, [grad, dlse])
    theirs = torch.autograd.grad(
        [expected, expected_lse], exact, [grad.double(), dlse.double().masked_fill(blind, 0)]
    )
    for mine, wanted, tensor in zip(ours, theirs, tensors, strict=True):
        assert mine.dtype == tensor.dtype and mine.shape == tensor.shape
        if wanted.norm() < 1e-6:  # one key: softmax has no slope
            assert mine.norm() < 1e-2
        else:
            assert relative(mine, wanted) < bounds[1]
    return out


@pytest.mark.parametrize(
    ("shape", "values", "dtype"),
    [
        ((2, 65, 2, 64), None, torch.bfloat16),
        ((3, 1, 2, 64), None, torch.bfloat16),
        ((1, 130, 1, 128), None, torch.bfloat16),
        ((1, 33, 2, 192), 128, torch.bfloat16),
        ((1, 17, 1, 256), 256, torch.float16),
        ((1, 15, 3, 40), 24, torch.float16),
        ((1, 70, 2, 32), None, torch.float32),
    ],
    ids=str,
)
def test_causal(device, shape, values, dtype):
    check(inputs(shape, dtype, device, values=values))


@pytest.mark.parametrize(("queries", "keys"), [(17, 70), (70, 17), (1, 65), (130, 130)])
@pytest.mark.parametrize("causal", [True, False])
def test_other_numbers_of_keys(device, queries, keys, causal):
    """Causal rows end at the last key; the first rows of 70 queries see none of 17 keys."""
    tensors = inputs((1, queries, 2, 40), torch.float16, device, keys, values=24)
    out = check(tensors, causal=causal, scale=0.4)
    if causal and queries > keys:
        assert not out[:, : queries - keys].any()


@pytest.mark.parametrize("width", [5, 80])
def test_any_width(device, width):
    check(inputs((1, 20, 2, width), torch.float16, device, values=width - 3))


@pytest.mark.parametrize(
    ("shape", "shared", "values", "dtype", "options"),
    [
        ((1, 33, 2, 64), 2, None, torch.bfloat16, {"dropout": 0.3, "seed": 5}),
        ((2, 17, 4, 192), 4, 128, torch.bfloat16, {}),
        ((1, 72, 6, 64), 3, None, torch.bfloat16, {"cu_seqlens": torch.tensor([0, 7, 72])}),
    ],
    ids=str,
)
def test_heads_that_share_keys(device, shape, shared, values, dtype, options):
    """Gradients of k and v are sums over the heads of their group; the rest is as with copies."""
    tensors = inputs(shape, dtype, device, values=values, shared=shared)
    out = check(tensors, **options)
    copies = [tensors[0], *(x.repeat_interleave(shared, 2) for x in tensors[1:])]
    expected = attention(*copies, **options)
    assert torch.equal(out, expected)
    first, second = (
        torch.autograd.grad(attention(*tensors, **options), tensors, out.detach()) for _ in range(2)
    )
    assert all(map(torch.equal, first, second))
    assert torch.equal(first[0], torch.autograd.grad(expected, tensors[0], out.detach())[0])


def test_heads_whose_programs_take_turns(device, monkeypatch):
    """The order in which programs start changes no bit of the gradients."""
    row = 4 * 32  # bytes of q and dout, or of k and v
    assert [tiles.heads_together(6, n << 20) for n in (1, 4, 6, 7, 12, 100)] == [6, 6, 3, 3, 2, 1]
    tensors = inputs((2, 70, 4, 32), torch.bfloat16, device)
    runs = []
    for heads in (1, 2, 4):
        monkeypatch.setattr(tiles, "SHARE_OF_L2", heads * 70 * row)
        out = attention(*tensors)
        runs.append(torch.autograd.grad(out.float().square().sum(), tensors))
    assert all(map(torch.equal, runs[0], runs[1])) and all(map(torch.equal, runs[0], runs[2]))


def test_packed_sequences(device):
    ends = torch.tensor([0, 0, 1, 66, 66, 129, 130], device=device)
    tensors = inputs((1, 130, 2, 64), torch.bfloat16, device)
    out = check(tensors, cu_seqlens=ends)
    again = attention(*tensors, cu_seqlens=ends.int().cpu())
    assert torch.equal(out, again)
    alone = attention(*(x[:, 1:66] for x in tensors))
    assert torch.equal(out[:, 1:66], alone)


def test_dropout(device):
    tensors = inputs((2, 70, 2, 64), torch.bfloat16, device)
    out = check(tensors, dropout=0.3, seed=2**40 + 7)
    seed = torch.tensor([2**40 + 7], device=device)
    assert torch.equal(out, attention(*tensors, dropout=0.3, seed=seed))
    assert not torch.equal(out, attention(*tensors, dropout=0.3, seed=8))


def test_dropout_of_packed_sequences(device):
    ends = torch.tensor([0, 33, 90])
    check(inputs((1, 90, 2, 32), torch.float32, device), cu_seqlens=ends, dropout=0.5, seed=3)


def test_dropout_mask_is_what_the_kernel_keeps(device):
    """Values that single out each key show the probabilities themselves."""
    q = torch.zeros(1, 64, 2, 64, device=device).bfloat16()
    v = torch.eye(64, device=device)[None, :, None].expand(1, 64, 2, 64).bfloat16()
    out = attention(q, q, v, dropout=0.25, seed=99).permute(0, 2, 1, 3).cpu()
    mask = attention_dropout_mask(99, (1, 2, 64, 64), 0.25)
    assert torch.equal(out != 0, mask & torch.ones(64, 64, dtype=torch.bool).tril())
    assert 0.74 < attention_dropout_mask(1, (2, 2, 128, 128), 0.25).double().mean() < 0.76


def test_causality_to_the_bit(device):
    q, k, v = (x.detach() for x in inputs((1, 140, 1, 64), torch.bfloat16, device))
    out = attention(q, k, v)
    k[:, 70:], v[:, 70:] = 1e4, -1e4
    assert torch.equal(out[:, :70], attention(q, k, v)[:, :70])
    k[:, 130:], v[:, 130:] = float("nan"), float("inf")
    assert torch.equal(out[:, :70], attention(q, k, v)[:, :70])  # tiles of keys that nobody reads


def test_large_scores(device):
    q, k, v = inputs((1, 65, 1, 32), torch.float32, device)
    with torch.no_grad():
        q *= 60
    check([q, k, v], (1e-4, 1e-4, 1e-3))
    with torch.no_grad():  # all scores far below zero: exp(-lse) overflows where keys are padding
        q.abs_()
        k.copy_(-k.abs())
    out, lse = attention(q, k, v, return_lse=True)
    assert lse.max() < -100
    grads = torch.autograd.grad(out.square().sum(), [q, k, v])
    assert all(g.isfinite().all() for g in grads)


def test_precision_and_dtype_of_the_result(device):
    check(inputs((1, 34, 1, 32), torch.float32, device), (2e-3, 4e-3, 5e-3), precision="tf32")
    tensors = inputs((1, 34, 1, 64), torch.bfloat16, device)
    out = check(tensors, out_dtype=torch.float32)
    assert out.dtype == torch.float32
    assert attention(*tensors).dtype == torch.bfloat16


def test_views_and_strided_gradients(device):
    """q, k, v of one fused projection; a gradient that is a transposed or an expanded view."""
    fused = torch.randn(2, 33, 3 * 2 * 64, device=device).bfloat16().requires_grad_()
    views = fused.view(2, 33, 3, 2, 64).unbind(2)
    out = attention(*views)
    grad = torch.randn(2, 2, 33, 64, device=device).bfloat16().transpose(1, 2)
    out.backward(grad)
    exact = fused.detach().double().requires_grad_()
    expected, _ = attention_reference(*exact.view(2, 33, 3, 2, 64).unbind(2))
    expected.backward(grad.double())
    assert relative(out, expected) < 4e-3 and relative(fused.grad, exact.grad) < 6e-3
    heads_first = [x.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3) for x in views]
    assert torch.equal(attention(*heads_first), out)
    turned = [x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0) for x in views]
    assert torch.equal(attention(*turned), out)
    tensors = inputs((1, 20, 1, 40), torch.float16, device, values=24)
    check(tensors, grad=torch.ones(1, 1, 1, 1, device=device).half().expand(1, 20, 1, 24))


def test_runs_do_not_differ(device):
    tensors = inputs((1, 70, 2, 64), torch.bfloat16, device)
    runs = []
    for _ in range(2):
        out = attention(*tensors, dropout=0.1, seed=5)
        runs.append((out, *torch.autograd.grad(out.float().square().sum(), tensors)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("shape", [(0, 5, 2, 16), (2, 0, 2, 16), (2, 5, 0, 16)], ids=str)
def test_nothing_to_do(device, shape):
    tensors = inputs(shape, torch.float32, device)
    out, lse = attention(*tensors, return_lse=True)
    out.sum().backward()
    assert out.shape == shape and lse.numel() == 0
    assert all(x.grad.shape == x.shape for x in tensors)


def test_no_keys(device):
    q, k, v = inputs((1, 4, 2, 16), torch.float32, device, keys=0)
    out, lse = attention(q, k, v, return_lse=True)
    out.sum().backward()
    assert not out.any() and (lse == -float("inf")).all() and not q.grad.any()


def test_operator_is_sound(device):
    q, k, v = inputs((1, 9, 2, 32), torch.float32, device)
    seed = torch.tensor([4], device=device)
    ends = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
    rest = (True, 0.25, 0.5, "tf32x3", torch.float32)
    torch.library.opcheck(torch.ops.minitriton.attention, (q, k, None, v, None, ends, seed, *rest))


def test_torch_compile_without_graph_breaks(device):
    tensors = inputs((1, 20, 2, 32), torch.float32, device)
    options = {"dropout": 0.2, "seed": 1, "cu_seqlens": torch.tensor([0, 7, 20], device=device)}
    compiled = torch.compile(
        lambda q, k, v: attention(q * 2, k, v, **options) + v, fullgraph=True, backend="aot_eager"
    )
    out = compiled(*tensors)
    expected = attention(tensors[0] * 2, *tensors[1:], **options) + tensors[2]
    torch.testing.assert_close(out, expected)
    ours = torch.autograd.grad(out.square().sum(), tensors)
    theirs = torch.autograd.grad(expected.square().sum(), tensors)
    torch.testing.assert_close(ours, theirs)


ENDS = torch.tensor([0, 2, 4])


@pytest.mark.parametrize(
    ("change", "options", "match"),
    [
        (lambda q, k, v: (q.double(), k, v), {}, "argument 'q': dtype torch.float64"),
        (lambda q, k, v: (q[0], k, v), {}, r"argument 'q': shape \(4, 2, 8\); it must be \[B, T, "),
        (lambda q, k, v: (q.repeat(1, 1, 1, 33), k, v), {}, "argument 'q': 264 channels per head"),
        (lambda q, k, v: (q, k[..., :3], v), {}, r"argument 'k': .* needs \(1, any, any, 8\)"),
        (lambda q, k, v: (q, k.repeat(1, 1, 2, 1)[:, :, :3], v), {}, "3 heads do not divide the 2"),
        (lambda q, k, v: (q, k[:, :, :0], v), {}, "argument 'k': 0 heads do not divide the 2 of"),
        (lambda q, k, v: (q, k[:, :, :1], v), {}, r"argument 'v': .* needs \(1, 4, 1, any\)"),
        (lambda q, k, v: (q, k.half(), v), {}, "argument 'k': dtype torch.float16 differs"),
        (lambda q, k, v: (q, k, v[:, :2]), {}, r"argument 'v': .* needs \(1, 4, 2, any\)"),
        (lambda q, k, v: (q, k, v[..., :0]), {}, "argument 'v': 0 channels per head"),
        (lambda q, k, v: (q, k, v.to("meta")), {}, "argument 'v': device meta differs"),
        (lambda q, k, v: (q, k, None), {}, "argument 'v': expected a tensor, got NoneType"),
        (None, {"causal": 1}, "argument 'causal': must be True or False"),
        (None, {"scale": -1.0}, "argument 'scale': must be a positive number"),
        (None, {"dropout": 1.0, "seed": 1}, r"argument 'dropout': must be in \[0, 1\), got 1.0"),
        (None, {"dropout": 0.1}, "argument 'seed': None; dropout needs an int"),
        (None, {"dropout": 0.1, "seed": ENDS}, "argument 'seed': torch.int64 of 3 elements"),
        (None, {"precision": "bf16"}, "argument 'precision': 'bf16'; it is one of tf32, "),
        (None, {"out_dtype": torch.float64}, "argument 'out_dtype': torch.float64"),
        (None, {"return_lse": None}, "argument 'return_lse': must be True or False"),
        (None, {"cu_seqlens": [0, 4]}, "argument 'cu_seqlens': must be a tensor of int64 or int32"),
        (None, {"cu_seqlens": ENDS[:1]}, r"argument 'cu_seqlens': shape \(1,\); it must be \[N \+"),
        (None, {"cu_seqlens": ENDS[:2]}, "'cu_seqlens': runs from 0 to 2; .* 0 to the 4 tokens"),
        (None, {"cu_seqlens": ENDS.flip(0)}, "argument 'cu_seqlens': runs from 4 to 0; it must"),
        (None, {"cu_seqlens": torch.tensor([0, 3, 2, 4])}, "'cu_seqlens': falls from 3 to 2 at in"),
        (None, {"cu_seqlens": ENDS.to("meta")}, "'cu_seqlens': device meta; it must be .* the CPU"),
        (lambda q, k, v: (q.repeat(2, 1, 1, 1), k.repeat(2, 1, 1, 1), v.repeat(2, 1, 1, 1)),
         {"cu_seqlens": ENDS}, "packed sequences need a batch of 1; 'q' has 2"),
        (lambda q, k, v: (q, k[:, :2], v[:, :2]), {"cu_seqlens": ENDS},
         "argument 'k': 2 tokens; with 'cu_seqlens' it needs those of 'q', 4"),
    ],
)  # fmt: skip
def test_refused_before_launch(device, change, options, match):
    tensors = [x.detach() for x in inputs((1, 4, 2, 8), torch.float32, device)]
    with pytest.raises(KernelArgumentError, match=match):
        attention(*(change(*tensors) if change else tensors), **options)
