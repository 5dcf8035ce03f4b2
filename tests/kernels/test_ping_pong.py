"""Kernels of four warps of which a CTA gets two groups, each with programs of its own."""

import pytest
import torch

import minitriton as triton
import minitriton.language as tl
from minitriton import execute
from tests.kernels.test_tma import BF16, error_of
from tests.kernels.test_warp_split import (
    NAN,
    is_split,
    once,
    only_gpu,
    operands,
    product,
    product_of_batches,
    product_of_descriptors,
)

pytestmark = pytest.mark.usefixtures("hopper")
FOUR_WARPS = {"num_warps": 4, "num_stages": 3}


def plays(compiled):
    return is_split(compiled) and compiled.metadata.get("consumer_groups") == 2


@pytest.fixture(params=[1, 2])
def ctas(request, monkeypatch):
    """So many CTAs for all programs, in the emulator."""
    monkeypatch.setattr(execute, "EMULATED_CTAS", request.param)


@pytest.mark.parametrize(
    ("shape", "b_t"),
    [((128, 128, 64), False), ((31, 257, 131), True), ((259, 131, 77), False),
     ((128, 600, 330), True), ((800, 70, 192), False)],
    ids=str,
)  # fmt: skip
def test_products(device, ctas, shape, b_t):
    """Of 1, 3, 6, 5 and 7 programs, of 1 to 6 iterations in 3 slots."""
    a, b, c = operands(device, *shape, b_t)
    compiled = product(a, b, c, **FOUR_WARPS)
    assert plays(compiled) and compiled.num_warps == 12 and error_of(a, b, c) < 1e-3


@once
@pytest.mark.parametrize("stages", [2, 4])
def test_products_that_land_at_random(device, at_random, ctas, stages):
    a, b, c = operands(device, 259, 300, 203, False)
    assert plays(product(a, b, c, num_warps=4, num_stages=stages)) and error_of(a, b, c) < 1e-3


def test_no_depth(device):
    a, b, c = operands(device, 259, 131, 64, False)
    product(a, b, c, k=0, **FOUR_WARPS)
    assert not c.any()
    assert plays(product(a, b, c, **FOUR_WARPS)) and error_of(a, b, c) < 1e-3


def test_grids_of_two_dimensions(device):
    compiled, error = product_of_descriptors(device, (300, 150, 200), 4)
    assert plays(compiled) and error < 1e-6


@once
def test_batches_along_the_third_axis(device, at_random):
    compiled, error = product_of_batches(device, 4)
    assert plays(compiled) and error < 1e-6


@triton.jit
def busy_end_kernel(
    a_ptr, b_ptr, row_ptr, c_ptr, sum_ptr, peak_ptr, K, N: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """The end of a program exchanges values through shared memory, and adds to global memory."""
    rm, rn, rk = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, N), tl.arange(0, BK)
    acc = tl.zeros((BM, N), tl.float32)
    for k in range(0, K, BK):
        a = tl.load(a_ptr + rm[:, None] * K + (k + rk)[None, :])
        b = tl.load(b_ptr + (k + rk)[:, None] * N + rn[None, :])
        acc = tl.dot(a, b, acc)
    acc += tl.load(row_ptr + rn)[None, :]
    if TURNED:
        tl.store(c_ptr + rn[:, None] * tl.num_programs(0) * BM + rm[None, :], tl.trans(acc))
    else:
        tl.store(peak_ptr + rm, tl.max(acc, 1))
        tl.atomic_add(sum_ptr + rn, tl.sum(acc, 0))


@once
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("programs", [1, 5])
def test_the_other_group_multiplies_meanwhile(device, at_random, ctas, programs, turned):
    """Scratch memory and barriers at the end of a program are the group's own."""
    m, n, k = 128 * programs, 128, 192
    a, b = (torch.randn(shape, device=device).to(BF16) for shape in ((m, k), (k, n)))
    row = torch.randn(n, device=device)
    c = torch.full((n, m), NAN, device=device)
    total, peak = torch.zeros(n, device=device), torch.full((m,), NAN, device=device)
    compiled = busy_end_kernel[(programs,)](
        a, b, row, c, total, peak, k, n, 128, 64, turned, num_warps=4, num_stages=2
    )
    expected = a.double() @ b.double() + row.double()
    pairs = [(total, expected.sum(0)), (peak, expected.amax(1))]
    assert plays(compiled)
    for mine, right in [(c.T, expected)] if turned else pairs:
        assert ((mine.double() - right).norm() / right.norm()).item() < 1e-5


@only_gpu
@pytest.mark.parametrize("shape", [(1024, 1024, 1024), (4096, 4096, 320)], ids=str)
def test_runs_are_bitwise_equal(device, shape):
    """A race would show as a run that differs; with one program per group, and with several."""
    a, b, c = operands(device, *shape, False)
    product(a, b, c, num_warps=4, num_stages=4)
    first = c.clone()
    for _ in range(600):
        assert plays(product(a, b, c.fill_(NAN), num_warps=4, num_stages=4))
        assert torch.equal(c, first)
