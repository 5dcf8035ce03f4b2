"""Places sorted by id against torch's stable sort."""

import pytest
import torch

from minitriton.kernels import sorted_ids as module
from minitriton.kernels.sorted_ids import sorted_ids


def expected(ids, bound):
    known = torch.where((ids >= 0) & (ids < bound), ids.long(), bound)
    index, place = known.sort(stable=True)
    return index.int(), place.int()


def same(ids, bound):
    found = sorted_ids(ids, bound)
    return all(torch.equal(a, b) for a, b in zip(found, expected(ids, bound), strict=True))


@pytest.mark.parametrize("count", [1, 511, 512, 513, 1700])
@pytest.mark.parametrize("bound", [7, 50304, 2**24 + 3], ids=["few", "many", "wide keys"])
def test_places(device, count, bound):
    assert same(torch.randint(bound, (count,), device=device), bound)


@pytest.mark.parametrize("count", [32, 100, 128, 129, 600, 2049])
def test_several_merges(device, monkeypatch, count):
    """Short lists, few at a time, so that groups of merged lists are merged again."""
    monkeypatch.setattr(module, "LIST", 32)
    monkeypatch.setattr(module, "LISTS", 4)
    assert same(torch.randint(50, (count,), device=device), 50)
    assert same(torch.full((count,), 3, device=device), 4)


def test_strangers_come_last(device):
    ids = torch.randint(-3, 12, (900,), device=device)
    ids[::7] += 2**32  # known by their low bits
    ids[5] = -(2**63)
    assert same(ids, 9)
    assert same(ids.int(), 9)
    assert same(torch.full((40,), -1, device=device), 9)
