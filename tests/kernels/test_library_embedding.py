"""Embeddings against torch, as a torch operator, and refused arguments."""

import pytest
import torch

from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.embedding import (
    embedding,
    embedding_gradients,
    embedding_reference,
    tied_embedding,
)

BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}


def relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    return ((out.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def inputs(device, dtype, batch, length, vocabulary, columns):
    ids = torch.randint(vocabulary, (batch, length), device=device)
    weight, positions = (
        torch.randn(n, columns, device=device).to(dtype).requires_grad_()
        for n in (vocabulary, length + 3)
    )
    return ids, weight, positions


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("probability", [0.0, 0.25])
@pytest.mark.parametrize("shape", [(3, 50, 65, 96), (1, 1, 1, 1), (2, 40, 300, 65)], ids=str)
def test_embedding(device, shape, probability, dtype):
    ids, weight, positions = inputs(device, dtype, *shape)
    seed = torch.tensor([11], device=device) if probability else None
    options = {"dropout": probability, "seed": seed}
    exact = [x.detach().double().requires_grad_() for x in (weight, positions)]
    out, expected = (
        embedding(ids, weight, positions, **options),
        embedding_reference(ids, *exact, **options),
    )
    grad = torch.randn_like(out)
    out.backward(grad)
    expected.backward(grad.double())
    assert out.dtype == dtype and out.shape == expected.shape
    assert relative(out, expected) < BOUNDS[dtype]
    assert relative(weight.grad, exact[0].grad) < 2 * BOUNDS[dtype]
    assert relative(positions.grad, exact[1].grad) < 2 * BOUNDS[dtype]
    assert not positions.grad[shape[1] :].any()


def test_without_positions(device):
    ids, weight, _ = inputs(device, torch.float32, 2, 5, 9, 20)
    out = embedding(ids.int().mT, weight, out_dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, weight[ids.mT].bfloat16())
    out.sum().backward()
    counts = torch.bincount(ids.flatten(), minlength=9).float()
    assert torch.equal(weight.grad, counts[:, None].expand(9, 20))


def test_many_tokens_are_split(device):
    """Partial sums of slices of the tokens, and what is added for a tied head."""
    ids, weight, _ = inputs(device, torch.float32, 3, 301, 20, 40)
    grad = torch.randn(3, 301, 40, device=device)
    extra = torch.randn(20, 40, device=device)
    out = embedding_gradients(
        grad, ids, torch.empty_like(weight), weight.new_empty(0), 0.0, None, extra=extra
    )[0]
    hot = torch.nn.functional.one_hot(ids.flatten(), 20).double()
    assert relative(out, hot.T @ grad.flatten(0, 1).double() + extra.double()) < 1e-6


def test_tied_to_the_head(device):
    ids, weight, positions = inputs(device, torch.float32, 2, 9, 17, 24)
    exact = [x.detach().double().requires_grad_() for x in (weight, positions)]
    rows, head = tied_embedding(ids, weight, positions)
    (rows @ head.T).square().sum().backward()
    rows = embedding_reference(ids, *exact)
    (rows @ exact[0].T).square().sum().backward()
    assert relative(weight.grad, exact[0].grad) < 1e-5
    assert relative(positions.grad, exact[1].grad) < 1e-5
    weight.grad = None
    tied_embedding(ids, weight)[1].sum().backward()
    assert weight.grad.eq(1).all()


def test_unknown_ids_give_nan(device):
    weight = torch.randn(4, 8, device=device)
    out = embedding(torch.tensor([0, 4, -1, 2**33, 3], device=device), weight)
    assert out.isnan().all(1).tolist() == [False, True, True, True, False]


def test_equal_bits_every_time_and_no_ids(device):
    ids, weight, positions = inputs(device, torch.bfloat16, 2, 130, 7, 24)
    runs = [
        torch.autograd.grad(embedding(ids, weight, positions).square().sum(), (weight, positions))
        for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    out = embedding(ids[:0], weight, positions)
    out.sum().backward()
    assert out.shape == (0, 130, 24) and not weight.grad.any() and not positions.grad.any()


def test_operator_is_sound(device):
    ids, weight, positions = inputs(device, torch.float32, 2, 5, 9, 20)
    seed = torch.tensor([11], device=device)
    torch.library.opcheck(
        torch.ops.minitriton.embedding, (ids, weight, positions, 0.2, seed, torch.float32)
    )
    compiled = torch.compile(embedding, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        compiled(ids, weight, positions), embedding(ids, weight, positions), rtol=0, atol=0
    )


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda i, w, p: embedding(i.float(), w, p), "argument 'ids': must be a tensor of int64"),
        (
            lambda i, w, p: embedding(i[0, 0], w, p),
            "argument 'ids': shape .*at least one dimension",
        ),
        (lambda i, w, p: embedding(i, w[0], p), r"argument 'weight': shape \(20,\); it must be"),
        (lambda i, w, p: embedding(i, w, p[:3]), r"argument 'positions': shape \(3, 20\); ids of"),
        (lambda i, w, p: embedding(i, w, p.half()), "argument 'positions': dtype torch.float16"),
        (lambda i, w, p: embedding(i.to("meta"), w, p), "argument 'ids': device meta"),
        (lambda i, w, p: embedding(i, w, p, dropout=0.5), "argument 'seed': must be an int64"),
    ],
)
def test_refused_before_launch(device, call, match):
    with pytest.raises(KernelArgumentError, match=match):
        call(*inputs(device, torch.float32, 2, 5, 9, 20))
