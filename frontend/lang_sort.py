"""Sorting along a dimension of a tile, by bitonic networks (Batcher 1968).

A pair of elements whose places differ in one bit is compared, and exchanged where it is in the
wrong order. For log2(n) = L there are L (L + 1) / 2 such steps; each brings one bit of the place
into the registers of a thread, if it is not there.
"""

from __future__ import annotations

from typing import Any

from minitriton.frontend import arithmetic, constants
from minitriton.frontend.active import builtin, emitter
from minitriton.frontend.errors_semantic import NotSorted, WrongDtype
from minitriton.frontend.lang_create import arange
from minitriton.frontend.lang_shape import join, permute, reshape, split, tile
from minitriton.frontend.values import Tensor, unwrap
from minitriton.ir.linear_layout import hull, log2_exact


@builtin
def sort(x: Any, dim: Any = None, descending: Any = False) -> Tensor:
    """The elements along `dim` (None: the last) in order; the places of NaN are unspecified."""
    value, axis = _operand("tl.sort", x, dim)
    down = constants.flag(descending, "descending")
    return _along(value, axis, lambda rows: _sorted(rows, log2_exact(rows.shape[-1]), down))


@builtin
def topk(x: Any, k: Any, dim: Any = None) -> Tensor:
    """The `k` largest elements along `dim` (None: the last), largest first; no NaN among them."""
    value, axis = _operand("tl.topk", x, dim)
    size = value.shape[axis]
    count = constants.integer(k, "k of tl.topk")
    if not 0 < count <= size or count != hull(count):
        raise NotSorted("tl.topk", "k", f"a power of two of at most {size}", count).about("k")
    return _along(value, axis, lambda rows: _largest(rows, log2_exact(count)))


def _operand(function: str, x: Any, dim: Any) -> tuple[Tensor, int]:
    value = tile(function, x)
    if value.dtype.is_ptr() or value.dtype.is_bool():
        raise WrongDtype(function, str(value.type), "numbers").about("x")
    rank = len(value.shape)
    axis = rank - 1 if unwrap(dim) is None else constants.axis(dim, rank, "dim")
    size = value.shape[axis]
    if size != hull(size):
        what = f"the size of dimension {axis}"
        raise NotSorted(function, what, "a power of two", size).about("x")
    return value, axis


def _along(value: Tensor, axis: int, function: Any) -> Tensor:
    """`function` of the tile with `axis` last, in the old order."""
    rank = len(value.shape)
    order = (*range(axis), *range(axis + 1, rank), axis)
    back = (*range(axis), rank - 1, *range(axis, rank - 1))
    result: Tensor = permute(function(permute(value, order)), back)
    return result


def _sorted(value: Tensor, bits: int, down: bool | None) -> Tensor:
    """Each block of 2^bits in order: all `down` or not; None: every other one, the second first."""
    for stage in range(1, bits + 1):
        value = _merged(value, stage, down if stage == bits else None)
    return value


def _largest(value: Tensor, bits: int) -> Tensor:
    """The largest 2^bits, from blocks of that size: of two that are sorted in opposite orders the
    larger elements of all pairs are the largest, and bitonic."""
    alone = value.shape[-1] == 1 << bits
    value = _sorted(value, bits, True if alone else None)
    while value.shape[-1] > 1 << bits:
        left, right = _halves(value, bits)
        e = emitter()
        larger = arithmetic.select(e, arithmetic.compare(e, left, right, "<"), right, left)
        value = reshape(larger, (*value.shape[:-1], value.shape[-1] // 2))
        value = _merged(value, bits, True if value.shape[-1] == 1 << bits else None)
    return value


def _merged(value: Tensor, stage: int, down: bool | None) -> Tensor:
    """Sorts bitonic blocks of 2^stage; `down` as for `_sorted`."""
    for bit in reversed(range(stage)):
        value = _exchanged(value, bit, stage, down)
    return value


def _exchanged(value: Tensor, bit: int, stage: int, down: bool | None) -> Tensor:
    """Puts pairs of elements 2^bit apart in order."""
    e = emitter()
    left, right = _halves(value, bit)
    wrong = arithmetic.compare(e, left, right, "<" if down else ">")
    if down is None:  # by the bit above the block, of the place
        upper = arange(0, left.shape[-2])
        odd = arithmetic.and_(e, arithmetic.shr(e, upper, stage - bit - 1), 1)
        turned = arithmetic.compare(e, odd, 1, "==")
        turned = reshape(turned, (*[1] * (len(left.shape) - 2), left.shape[-2], 1))
        wrong = arithmetic.xor(e, wrong, arithmetic.broadcast_to(e, turned, left.shape))
    first = arithmetic.select(e, wrong, right, left)
    second = arithmetic.select(e, wrong, left, right)
    rank = len(left.shape)
    pairs = permute(join(first, second), (*range(rank - 1), rank, rank - 1))
    return reshape(pairs, value.shape)


def _halves(value: Tensor, bit: int) -> tuple[Tensor, Tensor]:
    """The elements whose place has `bit` clear and set: [..., places above, places below]."""
    lead, size = value.shape[:-1], value.shape[-1]
    pairs = reshape(value, (*lead, size >> (bit + 1), 2, 1 << bit))
    rank = len(pairs.shape)
    left, right = split(permute(pairs, (*range(rank - 2), rank - 1, rank - 2)))
    return left, right
