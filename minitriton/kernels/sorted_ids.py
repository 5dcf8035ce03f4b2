"""Places of equal ids side by side: a stable sort of places by the id that stands there.

A warp sorts a list of LIST places by itself. Then up to LISTS sorted lists at a time become one:
an element's new place is its own in its list, plus how many elements of each other list come
before it, which bisection finds. So 16384 ids take two launches, and 2^19 take three. Nothing is
counted by atomics; equal inputs give equal results.
"""

from __future__ import annotations

import torch

import minitriton as triton
import minitriton.language as tl

HIGHEST: tl.constexpr = tl.constexpr(2**31 - 1)
LIST, LISTS = 512, 32  # places that a warp sorts, sorted lists that a launch merges
ELEMENTS = 32  # of a list, that a program of the merge places


@triton.jit
def count_below(list_ptr, length, wanted, largest, levels):
    """How many elements of sorted int32 lists of `length` are below `wanted`.

    largest: a power of two, lists hold fewer than twice as many; levels: log2(largest) + 1. The
    shapes broadcast to that of `wanted`.
    """
    below = wanted * 0
    for level in tl.range(levels):
        probe = below + (largest >> level)
        found = tl.load(list_ptr + (probe - 1), mask=probe <= length, other=HIGHEST)
        below = tl.where(found < wanted, probe, below)
    return below


@triton.jit
def _sort_kernel(
    ids_ptr, id_ptr, place_ptr, count, bound, LIST: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    first = tl.program_id(0) * LIST
    local = tl.arange(0, LIST)
    index = tl.load(ids_ptr + first + local, mask=local < count - first, other=-1)
    key = tl.where((index >= 0) & (index < bound), index, bound)
    key = tl.sort(key.to(tl.int64 if WIDE else tl.int32) * LIST + local)
    mask = local < count - first  # the places beyond the end have come last
    tl.store(id_ptr + first + local, (key // LIST).to(tl.int32), mask=mask)
    tl.store(place_ptr + first + local, first + (key % LIST).to(tl.int32), mask=mask)


@triton.jit
def _merge_kernel(
    id_ptr, place_ptr, id_out_ptr, place_out_ptr, count, size, levels,
    LISTS: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Merges lists of `size`, of which the last may be shorter."""
    first = tl.program_id(0) * ELEMENTS
    at = first + tl.arange(0, ELEMENTS)
    index = tl.load(id_ptr + at, mask=at < count, other=0)
    place = tl.load(place_ptr + at, mask=at < count, other=0)
    own = first // size
    group = own // LISTS * LISTS
    rival = group + tl.arange(0, LISTS)
    begin = rival.to(tl.int64) * size
    length = tl.minimum(tl.maximum(count - begin, 0), size).to(tl.int32)
    wanted = index[None, :] + (rival < own).to(tl.int32)[:, None]  # there equal ones come before
    before = count_below(id_ptr + begin[:, None], length[:, None], wanted, size, levels)
    before = tl.where(rival[:, None] == own, (at - own * size)[None, :], before)
    to = group * size + tl.sum(before, 0)
    tl.store(id_out_ptr + to, index, mask=at < count)
    tl.store(place_out_ptr + to, place, mask=at < count)


def sorted_ids(ids: torch.Tensor, bound: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids in order and where in `ids` each stands, both int32 [n]; equal ids in order of place.

    ids: int64 or int32, contiguous, n of them, 1 <= n < 2^31; those outside 0..bound-1 come last,
    as `bound`, which is below 2^31 - 1. For callers inside the library: no checks.
    """
    count = ids.numel()
    room = torch.empty(2, 2, count, dtype=torch.int32, device=ids.device)
    found, spare = room.unbind()
    _sort_kernel[(triton.cdiv(count, LIST),)](
        ids, *found.unbind(), count, bound, LIST=LIST, WIDE=(bound + 1) * LIST > 2**31, num_warps=1
    )
    size = LIST
    while size < count:
        _merge_kernel[(triton.cdiv(count, ELEMENTS),)](
            *found.unbind(), *spare.unbind(), count, size, size.bit_length(), LISTS=LISTS,
            ELEMENTS=ELEMENTS, num_warps=4,
        )  # fmt: skip
        found, spare, size = spare, found, size * LISTS
    index, place = found.unbind()
    return index, place
