"""Both ways to the gradient of an embedding's weight, against sums in fp64."""

import pytest
import torch

from minitriton.kernels import embedding_gradient as module
from minitriton.kernels.embedding import embedding, tied_embedding
from minitriton.kernels.embedding_gradient import CHUNK, FEW, ROWS, by_products, by_runs

WAYS = {"products": by_products, "runs": by_runs}
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 3e-3, torch.float16: 4e-4}

either = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def expected(grad, ids, vocabulary, extra=None):
    known = (ids >= 0) & (ids < vocabulary)
    out = torch.zeros(vocabulary, grad.shape[1], dtype=torch.float64, device=grad.device)
    out.index_add_(0, ids[known].long(), grad[known].double())
    return out if extra is None else out + extra.double()


def found(way, grad, ids, vocabulary, extra=None):
    dweight = torch.full_like(grad[:1], float("nan")).repeat(vocabulary, 1)
    way(grad, ids, dweight, extra)
    return dweight


def agree(way, grad, ids, vocabulary, extra=None):
    out, wanted = found(way, grad, ids, vocabulary, extra), expected(grad, ids, vocabulary, extra)
    error = (out.double() - wanted).norm() / wanted.norm().clamp(min=1e-30)
    return error < BOUNDS[grad.dtype] and not out[wanted.eq(0).all(1)].any()


def gradient(device, tokens, columns, dtype=torch.float32):
    return torch.randn(tokens, columns, device=device).to(dtype)


@either
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", [(700, 300, 64), (37, 131, 65), (1, 200, 8)], ids=str)
def test_random_ids(device, way, dtype, shape):
    tokens, vocabulary, columns = shape
    ids = torch.randint(vocabulary, (tokens,), device=device)
    assert agree(way, gradient(device, tokens, columns, dtype), ids, vocabulary)


@either
@pytest.mark.parametrize("tokens", [CHUNK - 1, CHUNK, CHUNK + 1, CHUNK * (ROWS + 3) + 5])
def test_all_ids_equal(device, way, tokens):
    ids = torch.full((tokens,), 69, device=device, dtype=torch.int32)
    assert agree(way, gradient(device, tokens, 48), ids, 70)


@either
def test_few_ids_and_columns_of_several_programs(device, way):
    """Runs that begin and end within chunks, fill them, and go on over several."""
    counts = [1, 2, CHUNK - 3, CHUNK, 1, 3 * CHUNK, 2 * CHUNK + 5, 0, 7, ROWS + 1, 40]
    ids = torch.arange(len(counts), device=device).repeat_interleave(
        torch.tensor(counts, device=device)
    )
    assert agree(way, gradient(device, len(ids), 321, torch.bfloat16), ids, 200)
    ids = ids[torch.randperm(len(ids), device=device)]
    assert agree(way, gradient(device, len(ids), 321), ids, 200)


@either
def test_ids_outside_count_nowhere(device, way):
    ids = torch.randint(-3, 40, (300,), device=device)
    ids[::5] += 2**32  # its low bits would name an id
    ids[::11] = 2**31 + 3
    assert agree(way, gradient(device, 300, 40), ids, 30)
    assert not found(way, gradient(device, 70, 40), torch.full((70,), 30, device=device), 30).any()


@either
def test_gradient_of_the_head_is_added(device, way):
    ids, extra = torch.randint(150, (90,), device=device), gradient(device, 150, 24)
    assert agree(way, gradient(device, 90, 24), ids, 150, extra)


def test_large_vocabulary(device):
    ids = torch.tensor([69_999, 65_536, 0, 65_535, 65_536], device=device)
    assert agree(by_runs, gradient(device, 5, 8), ids, 70_000)


@either
def test_equal_bits_in_any_order_of_execution(device, at_random, way):
    ids = torch.randint(8, (400,), device=device) ** 2
    grad = gradient(device, 400, 40)
    first = found(way, grad, ids, 150)
    assert all(torch.equal(found(way, grad, ids, 150), first) for _ in range(3))


def test_runs_do_not_meet(device):
    """A gradient that is not finite stays with its id."""
    ids = torch.arange(3, device=device).repeat_interleave(CHUNK - 5)
    grad = gradient(device, len(ids), 16)
    grad[ids == 1] = float("nan")
    assert found(by_runs, grad, ids, 200).isnan().any(1).nonzero().flatten().tolist() == [1]


@either
def test_kernels_do_all_the_work(device, way):
    ids, grad = torch.randint(150, (600,), device=device), gradient(device, 600, 16)
    dweight = torch.empty(150, 16, device=device)
    way(grad, ids, dweight, None)  # what compiling does is not counted
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        way(grad, ids, dweight, None)
    seen = {e.key for e in profile.key_averages() if e.key.startswith("aten::")}
    assert seen <= {"aten::empty", "aten::unbind", "aten::select", "aten::as_strided"}


@pytest.mark.parametrize("vocabulary", [FEW, FEW + 1])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_way_is_chosen_by_size(device, monkeypatch, vocabulary, tied):
    ids = torch.randint(vocabulary, (2, 30), device=device)
    weight = gradient(device, vocabulary, 16).requires_grad_()
    taken = []
    for name in ("by_products", "by_runs"):
        whole = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args, whole=whole, name=name: (taken.append(name), whole(*args))
        )
    rows, head = tied_embedding(ids, weight) if tied else (embedding(ids, weight), weight)
    grad = torch.randn_like(rows)
    ((rows * grad).sum() + head.square().sum() / 2).backward()
    wanted = expected(grad.flatten(0, 1), ids.flatten(), vocabulary, weight.detach())
    assert (weight.grad.double() - wanted).norm() < 1e-6 * wanted.norm()
    assert taken == ["by_products" if vocabulary <= FEW else "by_runs"]
