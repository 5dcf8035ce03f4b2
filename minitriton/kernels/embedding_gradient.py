"""The gradient of an embedding's weight: rows of equal ids are added, without atomics.

A vocabulary of at most FEW ids: a program owns 16 ids and some channels, walks over the tokens and
multiplies by the one-hot matrix of those that are its own. That takes time in proportion to
vocabulary times tokens.

A larger one: tokens are sorted by id (`sorted_ids`), so that the rows of an id are a run of the
sorted order. A warp writes the rows of a few ids, each once: zeros, the sum of a short run, or the
sum of pieces. Runs that cross chunks of CHUNK places are cut there, and many programs have added
the rows of the pieces before, so that an id of very many tokens does not keep one warp busy long.

Sums are fp32, in a fixed order: equal inputs give equal bits.
"""

from __future__ import annotations

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels.gemm import sum_partials
from minitriton.kernels.sorted_ids import count_below, sorted_ids

FEW = 128  # ids, for which products are faster than sorting
IDS, SLICE, WIDTH = 16, 64, 64  # ids, tokens per step, channels of a program that multiplies
PROGRAMS = 528  # so many that multiply give four per SM of an H100
CHANNELS = 256  # of a program that adds rows
CHUNK = 32  # places
SEARCHED = 256  # ids per program whose runs are found
OWNED, ROWS = 8, 8  # ids of a warp; rows, or pieces of rows, that it adds at a time


@triton.jit
def _product_kernel(
    grad_ptr, ids_ptr, partial_ptr, tokens, vocabulary, columns, per_split,
    IDS: tl.constexpr, SLICE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0) * IDS + tl.arange(0, IDS)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    begin = tl.program_id(2) * per_split
    acc = tl.zeros([IDS, WIDTH], tl.float32)
    for first in range(begin, min(begin + per_split, tokens), SLICE):
        row = first + tl.arange(0, SLICE)
        index = tl.load(ids_ptr + row, mask=row < tokens, other=-1)
        index = tl.where(index >> 31 == 0, index, -1).to(tl.int32)  # 64 bits into 32
        hot = index[None, :] == own[:, None]
        if tl.max(hot.to(tl.int32)) > 0:
            source = grad_ptr + row.to(tl.int64)[:, None] * columns + at[None, :]
            mask = (row < tokens)[:, None] & (at < columns)[None, :]
            grad = tl.load(source, mask=mask, other=0.0)
            acc = tl.dot(hot.to(grad.dtype), grad, acc, input_precision="tf32x3")
    to = partial_ptr + (tl.program_id(2).to(tl.int64) * vocabulary + own[:, None]) * columns
    tl.store(to + at[None, :], acc, mask=(own < vocabulary)[:, None] & (at < columns)[None, :])


@triton.jit
def _sum_of_rows(grad_ptr, place_ptr, run, mask, at, columns):
    """The sum over the run of the rows of `grad` whose places stand in the sorted order there."""
    place = tl.load(place_ptr + run, mask=mask, other=0).to(tl.int64)
    source = grad_ptr + place[:, None] * columns + at[None, :]
    rows = tl.load(source, mask=mask[:, None] & (at < columns)[None, :], other=0.0)
    return tl.sum(rows.to(tl.float32), 0)


@triton.jit
def _piece_kernel(
    grad_ptr, id_ptr, place_ptr, start_ptr, piece_ptr, tokens, vocabulary, columns, chunks,
    largest, levels, CHUNK: tl.constexpr, CHANNELS: tl.constexpr, SEARCHED: tl.constexpr,
):  # fmt: skip
    """Where each id's run starts; sums of the pieces of runs that cross chunks of sorted places.

    Piece 2 c is the part in chunk c of a run that comes from the chunk before, 2 c + 1 of one that
    only goes on into the next. The other pieces are left as they are.
    """
    chunk = tl.program_id(0) - (tl.num_programs(0) - chunks)
    if chunk < 0:
        block = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        wanted = block * SEARCHED + tl.arange(0, SEARCHED)
        start = count_below(id_ptr, tokens, wanted, largest, levels)
        tl.store(start_ptr + wanted, start, mask=wanted <= vocabulary)
    else:
        at = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        first = chunk * CHUNK
        last = tl.minimum(first + CHUNK, tokens) - 1
        run = first + tl.arange(0, CHUNK)
        index = tl.load(id_ptr + run, mask=run <= last, other=-1)
        head, tail = tl.load(id_ptr + first), tl.load(id_ptr + last)
        before = tl.load(id_ptr + (first - 1), mask=first > 0, other=-1)
        after = tl.load(id_ptr + (last + 1), mask=last + 1 < tokens, other=-1)
        to = piece_ptr + chunk.to(tl.int64) * 2 * columns + at
        comes = (head == before) & (head < vocabulary)
        if comes:
            total = _sum_of_rows(grad_ptr, place_ptr, run, index == head, at, columns)
            tl.store(to, total, mask=at < columns)
        if (tail == after) & (tail < vocabulary) & ((tail != head) | (comes == 0)):
            total = _sum_of_rows(grad_ptr, place_ptr, run, index == tail, at, columns)
            tl.store(to + columns, total, mask=at < columns)


@triton.jit
def _sum_of_run(
    total, grad_ptr, place_ptr, piece_ptr, begin, end, at, columns,
    CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`total` + the rows of a run that is not empty, or its pieces if it crosses chunks."""
    chunk, last = begin // CHUNK, (end - 1) // CHUNK
    if chunk == last:
        row = grad_ptr + tl.load(place_ptr + begin).to(tl.int64) * columns
        total += tl.load(row + at, mask=at < columns, other=0.0).to(tl.float32)
        for first in range(begin + 1, end, ROWS):  # most runs end before
            run = first + tl.arange(0, ROWS)
            total += _sum_of_rows(grad_ptr, place_ptr, run, run < end, at, columns)
    else:
        for first in range(chunk, last + 1, ROWS):  # tiles of one shape have one layout
            piece = first + tl.arange(0, ROWS)
            source = 2 * piece + (piece == chunk).to(tl.int32)
            source = piece_ptr + source.to(tl.int64)[:, None] * columns + at[None, :]
            mask = (piece <= last)[:, None] & (at < columns)[None, :]
            total += tl.sum(tl.load(source, mask=mask, other=0.0), 0)
    return total


@triton.jit
def _run_kernel(
    grad_ptr, place_ptr, start_ptr, piece_ptr, extra_ptr, dweight_ptr, vocabulary, columns,
    IDS: tl.constexpr, CHANNELS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows of dweight, one after the other by a warp, which skips what a row does not need."""
    slices = tl.cdiv(columns, CHANNELS)  # whole rows are written at about the same time
    first = tl.program_id(0) // slices * IDS
    at = tl.program_id(0) % slices * CHANNELS + tl.arange(0, CHANNELS)
    begin = tl.load(start_ptr + first)
    for index in range(first, min(first + IDS, vocabulary)):
        end = tl.load(start_ptr + index + 1)
        to = index.to(tl.int64) * columns + at
        total = tl.zeros([CHANNELS], tl.float32)
        if extra_ptr is not None:
            total += tl.load(extra_ptr + to, mask=at < columns, other=0.0).to(tl.float32)
        if begin < end:
            total = _sum_of_run(
                total, grad_ptr, place_ptr, piece_ptr, begin, end, at, columns, CHUNK, ROWS
            )
        tl.store(dweight_ptr + to, total.to(dweight_ptr.dtype.element_ty), mask=at < columns)
        begin = end


def weight_gradient(
    grad: torch.Tensor, ids: torch.Tensor, dweight: torch.Tensor, extra: torch.Tensor | None
) -> None:
    """dweight[v] = sum of the rows of grad where ids is v, + extra[v]; other ids count nowhere.

    grad: [n, d] in any shape, contiguous; ids: n >= 1, int64 or int32, contiguous; dweight and
    extra: [V, d], contiguous, V < 2^31 - 1. For callers inside the library: no checks.
    """
    if dweight.shape[0] <= FEW:
        by_products(grad, ids, dweight, extra)
    else:
        by_runs(grad, ids, dweight, extra)


def by_products(
    grad: torch.Tensor, ids: torch.Tensor, dweight: torch.Tensor, extra: torch.Tensor | None
) -> None:
    """`weight_gradient` for few ids."""
    tokens, (vocabulary, columns) = ids.numel(), dweight.shape
    grid = [triton.cdiv(vocabulary, IDS), triton.cdiv(columns, WIDTH)]
    splits = max(1, min(PROGRAMS // (grid[0] * grid[1]), triton.cdiv(tokens, 4 * SLICE)))
    per_split = triton.cdiv(triton.cdiv(tokens, splits), SLICE) * SLICE
    partial = torch.empty(splits, vocabulary, columns, dtype=torch.float32, device=grad.device)
    _product_kernel[(*grid, splits)](
        grad, ids, partial, tokens, vocabulary, columns, per_split, IDS=IDS, SLICE=SLICE,
        WIDTH=WIDTH,
    )  # fmt: skip
    sum_partials(partial, dweight, extra=extra)


def by_runs(
    grad: torch.Tensor, ids: torch.Tensor, dweight: torch.Tensor, extra: torch.Tensor | None
) -> None:
    """`weight_gradient` for many ids."""
    tokens, (vocabulary, columns) = ids.numel(), dweight.shape
    channels = min(CHANNELS, triton.next_power_of_2(columns))
    slices, chunks = triton.cdiv(columns, channels), triton.cdiv(tokens, CHUNK)
    index, place = sorted_ids(ids, vocabulary)
    start = torch.empty(vocabulary + 1, dtype=torch.int32, device=grad.device)
    piece = torch.empty(2 * chunks, columns, dtype=torch.float32, device=grad.device)
    levels = tokens.bit_length()
    _piece_kernel[(chunks + triton.cdiv(vocabulary + 1, SEARCHED * slices), slices)](
        grad, index, place, start, piece, tokens, vocabulary, columns, chunks, 1 << (levels - 1),
        levels, CHUNK=CHUNK, CHANNELS=channels, SEARCHED=SEARCHED,
    )  # fmt: skip
    _run_kernel[(triton.cdiv(vocabulary, OWNED) * slices,)](
        grad, place, start, piece, extra, dweight, vocabulary, columns, IDS=OWNED,
        CHANNELS=channels, CHUNK=CHUNK, ROWS=ROWS, num_warps=1,
    )  # fmt: skip
