"""Products of groups of rows whose ends are loaded numbers: the suite's kernel (sm_90a), by TMA."""

import pytest
import torch

import minitriton as triton
from minitriton.bench.cases_products import tile_tables
from minitriton.bench.sources.products import grouped_matmul_kernel

BF16 = torch.bfloat16
pytestmark = pytest.mark.usefixtures("hopper")


def run(device, ends, n, k, blocks, room=(0, 0), **options):
    """(relative error, compiled); the storage of a has room[0] elements before it and room[1] after
    it, full of NaN."""
    rows, groups = ends[-1], len(ends)
    a = torch.full((room[0] + rows * k + room[1],), float("nan"), device=device, dtype=BF16)
    a = a[room[0] :][: rows * k].view(rows, k).copy_(torch.randn(rows, k))
    b = torch.randn(groups, n, k, device=device).to(BF16).transpose(1, 2)
    out = torch.full((rows, n), float("nan"), device=device, dtype=BF16)
    tables = [torch.tensor(t, device=device, dtype=torch.int32)
              for t in tile_tables(ends, blocks[0])]  # fmt: skip
    tiles = tables[0].numel()
    compiled = grouped_matmul_kernel[(tiles * triton.cdiv(n, blocks[1]),)](
        a, b, out, *tables, tiles, n, k, b.stride(0), *a.stride(), *b.stride()[1:], *out.stride(),
        *blocks, GROUP_M=2, **options,
    )  # fmt: skip
    bounds = zip([0, *ends], ends, strict=False)
    expected = torch.cat([a[s:e].float() @ b[i].float() for i, (s, e) in enumerate(bounds)])
    return ((out.float() - expected).norm() / expected.norm()).item(), compiled


@pytest.mark.parametrize(
    ("ends", "n", "k", "blocks", "options"),
    [
        ([40, 40, 168, 200, 200], 96, 144, (64, 64, 64), {"num_stages": 3}),
        ([5, 130, 130, 300], 128, 96, (128, 128, 64), {"num_stages": 3}),  # two in turns
        ([1, 129, 144], 272, 192, (128, 256, 64), {"num_warps": 8, "num_stages": 3}),
    ],
    ids=["small", "ping-pong", "persistent"],
)
def test_uneven_groups(device, ends, n, k, blocks, options):
    """Rows past a group's end are the next group's, or past the tensor's end."""
    error, compiled = run(device, ends, n, k, blocks, **options)
    assert error < 3e-3 and "cp.async.cg" not in compiled.asm["ptx"]
    assert compiled.persistent == (blocks[0] == 128)


@pytest.mark.parametrize(
    ("room", "by_tma"),
    [((0, 80 * 64), True), ((0, 8), False), ((80 * 64, 0), False), ((8, 0), False)],
)
def test_tensors_that_are_part_of_a_storage(device, room, by_tma, monkeypatch):
    """TMA takes those behind which whole rows follow and before which there is none. Rows of NaN
    after them are copied and multiplied, and not seen."""
    taken = []
    without = triton.compiled.CompiledKernel.without_tma
    monkeypatch.setattr(
        triton.compiled.CompiledKernel, "without_tma",
        lambda self: taken.append(self) or without(self),
    )  # fmt: skip
    error, _ = run(device, [5, 70], 64, 80, (64, 64, 64), room, num_stages=4)
    assert error < 3e-3
    if device == "cpu":
        assert bool(taken) != by_tma
