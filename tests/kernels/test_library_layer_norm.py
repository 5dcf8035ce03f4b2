"""Layer normalisation and dropout against fp64 and against their torch twins."""

import pytest
import torch

from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.dropout import dropout, dropout_reference, keep_mask
from minitriton.kernels.layer_norm import (
    add_layer_norm,
    add_layer_norm_reference,
    layer_norm,
    layer_norm_reference,
)
from minitriton.kernels.rows import ADD_LAYER_NORM_TILES, LAYER_NORM_TILES, NormTile

BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}


def relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    return ((out.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def exact_copies(tensors):
    return [x.detach().double().requires_grad_() for x in tensors]


def inputs(device, dtype, shape, count=1):
    rows = [
        (torch.randn(shape, device=device) * 2 + 1).to(dtype).requires_grad_() for _ in range(count)
    ]
    vectors = [torch.randn(shape[-1], device=device).requires_grad_() for _ in range(2)]
    return rows + vectors


def close(tensors, exact, bound):
    for x, y in zip(tensors, exact, strict=True):
        assert x.grad.dtype == x.dtype and relative(x.grad, y.grad) < bound


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 130), (1, 1), (33, 64), (2, 1025)], ids=str)
def test_layer_norm(device, shape, dtype):
    tensors = inputs(device, dtype, shape)
    exact = exact_copies(tensors)
    out, expected = layer_norm(*tensors), layer_norm_reference(*exact)
    grad = torch.randn_like(out)
    out.backward(grad)
    expected.backward(grad.double())
    assert out.dtype == dtype and out.is_contiguous()
    if shape[-1] == 1:  # every row is its own mean
        assert (
            torch.equal(out, tensors[2].to(dtype).expand(shape))
            and tensors[0].grad.abs().max() < 1e-4
        )
        return
    assert relative(out, expected) < BOUNDS[dtype]
    close(tensors, exact, 4 * BOUNDS[dtype])


@pytest.mark.parametrize(
    "tile",
    [NormTile(2, 1024, 4), NormTile(1, 1024, 4, True), NormTile(1, 256, 2, True)],
    ids=str,
)
def test_tiles(device, tile, monkeypatch):
    """Rows held or read again, in one block and in several, full and not, far from zero."""
    monkeypatch.setitem(LAYER_NORM_TILES, 1024, tile)
    for columns in (1024, 700, 520):
        x, weight, bias = inputs(device, torch.bfloat16, (3, columns))
        x = (x.detach() + 5).requires_grad_()
        for tensors in ([x, weight, bias], [x, weight]):
            exact = exact_copies(tensors)
            out, expected = layer_norm(*tensors), layer_norm_reference(*exact)
            assert relative(out, expected) < BOUNDS[x.dtype]
            grad = torch.randn_like(out)
            out.backward(grad)
            expected.backward(grad.double())
            close(tensors, exact, 4 * BOUNDS[x.dtype])
            x.grad = weight.grad = None


@pytest.mark.parametrize("tile", [NormTile(1, 512, 4, True), NormTile(1, 128, 1, True)], ids=str)
@pytest.mark.parametrize("branch_dtype", [torch.bfloat16, torch.float32, None], ids=str)
def test_tiles_of_sums(device, tile, branch_dtype, monkeypatch):
    """Sums that are made again for the result, bit by bit as those that are kept."""
    x, weight, bias = inputs(device, torch.bfloat16, (3, 400))
    branch = None if branch_dtype is None else torch.randn(3, 400, device=device).to(branch_dtype)
    held = add_layer_norm(x, branch, weight, bias)
    monkeypatch.setitem(ADD_LAYER_NORM_TILES, 512, tile)
    total, out = add_layer_norm(x, branch, weight, bias)
    assert torch.equal(total, held[0]) and relative(out, held[1].double()) < 5e-3
    exact = layer_norm_reference(total.double(), weight.double(), bias.double())
    assert relative(out, exact) < BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("probability", [0.0, 0.2])
@pytest.mark.parametrize("branch_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_add_layer_norm(device, probability, branch_dtype):
    x, weight, bias = inputs(device, torch.float32, (7, 100))
    branch = torch.randn(7, 100, device=device).to(branch_dtype).requires_grad_()
    tensors = [x, branch, weight, bias]
    seed = torch.tensor([2**40 + 17], device=device) if probability else None
    exact = exact_copies(tensors)
    options = {"dropout": probability, "seed": seed}
    outs = add_layer_norm(*tensors, **options)
    expected = add_layer_norm_reference(*exact, **options)
    grads = [torch.randn_like(o) for o in outs]
    torch.autograd.backward(outs, grads)
    torch.autograd.backward(expected, [g.double() for g in grads])
    for out, wanted in zip(outs, expected, strict=True):
        assert relative(out, wanted) < 2e-6
    close(tensors, exact, 4 * BOUNDS[branch_dtype])


def test_gradient_of_one_result_only(device):
    tensors = inputs(device, torch.float32, (4, 40), 2)
    for index in (0, 1):
        exact = exact_copies(tensors)
        outs, expected = add_layer_norm(*tensors), add_layer_norm_reference(*exact)
        ours = torch.autograd.grad(outs[index].square().sum(), tensors)
        theirs = torch.autograd.grad(expected[index].square().sum(), exact, allow_unused=True)
        for a, b in zip(ours, theirs, strict=True):
            assert not a.any() if b is None else relative(a, b) < 1e-5


def test_total_of_one_input(device):
    tensors = inputs(device, torch.float32, (4, 40))
    exact = exact_copies(tensors)
    total, out = add_layer_norm(tensors[0], None, *tensors[1:])
    assert torch.equal(total, tensors[0])
    (total.square() * out).sum().backward()
    total, out = add_layer_norm_reference(exact[0], None, *exact[1:])
    (total.square() * out).sum().backward()
    close(tensors, exact, 1e-5)


def test_output_dtype(device):
    tensors = inputs(device, torch.float32, (4, 40))
    exact = exact_copies(tensors)
    out = layer_norm(*tensors, out_dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    layer_norm_reference(*exact).sum().backward()
    close(tensors[1:], exact[1:], 1e-5)


def test_a_large_mean_does_not_cancel(device):
    x = 1000 + torch.randn(5, 256, device=device)
    weight = torch.ones(256, device=device)
    assert relative(layer_norm(x, weight), layer_norm_reference(x.double(), weight.double())) < 1e-4


def test_strided_and_empty(device):
    weight = torch.randn(24, device=device)
    base = torch.randn(6, 48, device=device)
    x = base[:, 24:]
    assert relative(layer_norm(x, weight), layer_norm_reference(x.double(), weight.double())) < 2e-6
    empty = torch.zeros(0, 24, device=device, requires_grad=True)
    leaf = weight.requires_grad_()
    layer_norm(empty, leaf).sum().backward()
    assert empty.grad.shape == (0, 24) and not leaf.grad.any()


def test_gradient_of_the_weight_over_many_rows(device):
    """Partial sums of more programs than one step of the last sum takes."""
    tensors = inputs(device, torch.float32, (1200, 20))
    exact = exact_copies(tensors)
    layer_norm(*tensors).square().sum().backward()
    layer_norm_reference(*exact).square().sum().backward()
    close(tensors, exact, 2e-6)


def test_dropout_has_the_mask_of_its_twin(device):
    seed = torch.tensor([-(2**62) + 5], device=device)
    for shape in ((5, 7, 300), (3, 4), (1,)):
        x = torch.randn(shape, device=device, requires_grad=True)
        out = dropout(x, 0.3, seed)
        torch.testing.assert_close(out, dropout_reference(x, 0.3, seed))
        grad = torch.randn(shape, device=device)
        (dx,) = torch.autograd.grad(out, x, grad)
        torch.testing.assert_close(dx, dropout_reference(grad, 0.3, seed))
    keep = keep_mask(seed, torch.Size((400, 500)), 0.3)
    assert abs(keep.float().mean() - 0.7) < 0.005
    assert abs(keep.float().mean(0).std() - (0.21 / 400) ** 0.5) < 0.003
    assert not torch.equal(keep, keep_mask(seed + 1, keep.shape, 0.3))
    x = torch.randn(9, 9, device=device)
    assert torch.equal(dropout(x, 0.0, seed), x)


def test_equal_bits_every_time(device):
    tensors = inputs(device, torch.bfloat16, (70, 130), 2)
    seed = torch.tensor([3], device=device)
    runs = [
        torch.autograd.grad(
            add_layer_norm(*tensors, dropout=0.2, seed=seed)[1].square().sum(), tensors
        )
        for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_operators_are_sound(device):
    x, branch, weight, bias = inputs(device, torch.float32, (3, 20), 2)
    seed = torch.tensor([3], device=device)
    ops = torch.ops.minitriton
    torch.library.opcheck(
        ops.add_layer_norm, (x, branch, weight, bias, True, 0.2, seed, 1e-5, torch.float32)
    )
    torch.library.opcheck(
        ops.add_layer_norm,
        (x.mT.contiguous().mT, None, weight, None, False, 0.0, None, 1e-5, torch.half),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip
    torch.library.opcheck(ops.dropout, (x, 0.2, seed))


def test_torch_compile_without_graph_breaks(device):
    tensors = inputs(device, torch.float32, (3, 20), 2)

    def function(x, branch, weight, bias):
        total, out = add_layer_norm(x * 2, branch, weight, bias)
        return total + out

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    out, expected = compiled(*tensors), function(*tensors)
    torch.testing.assert_close(out, expected)
    ours = torch.autograd.grad(out.square().sum(), tensors)
    torch.testing.assert_close(ours, torch.autograd.grad(expected.square().sum(), tensors))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda x, w: layer_norm(x.long(), w), "argument 'x': dtype torch.int64"),
        (lambda x, w: layer_norm(x[:, :0], w), "argument 'x': rows of 0 elements; 1 to 8192"),
        (lambda x, w: layer_norm(x, w[:3]), r"argument 'weight': shape \(3,\); it must be \(8,\)"),
        (lambda x, w: layer_norm(x, w.half()), "argument 'weight': dtype torch.float16; it must"),
        (lambda x, w: layer_norm(x, w, w.half()), "argument 'bias': dtype torch.float16 differs"),
        (lambda x, w: layer_norm(x, w, eps=-1.0), "argument 'eps': must be a positive number"),
        (lambda x, w: add_layer_norm(x, x[:2], w), r"argument 'branch': shape \(2, 8\) on"),
        (lambda x, w: add_layer_norm(x, x, w, dropout=1.0), r"argument 'dropout': must be in \[0,"),
        (lambda x, w: add_layer_norm(x, x, w, dropout=0.1), "argument 'seed': must be an int64"),
        (lambda x, w: dropout(x, 0.1, 7), "argument 'seed': must be an int64 tensor .*, got 7"),
        (lambda x, w: dropout(x, 0.1, torch.zeros(1).long().to("meta")), "'seed': device meta"),
        (lambda x, w: dropout(x, True, 7), "argument 'probability': must be in"),
    ],
)
def test_refused_before_launch(device, call, match):
    with pytest.raises(KernelArgumentError, match=match):
        call(torch.randn(4, 8, device=device), torch.randn(8, device=device))
