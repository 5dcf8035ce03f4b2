"""Functions of the language in which the elements of a tile say where others lie."""

from __future__ import annotations

from typing import Any

from minitriton.frontend import arithmetic, constants
from minitriton.frontend.active import builtin, emitter
from minitriton.frontend.casting import cast, retag, to_tensor
from minitriton.frontend.errors_semantic import IndexShape, RankMismatch, WrongDtype
from minitriton.frontend.lang_shape import tile
from minitriton.frontend.values import Tensor, unwrap
from minitriton.ir import dtypes
from minitriton.ir.dtypes import block_type


@builtin
def gather(src: Any, index: Any, axis: Any) -> Tensor:
    """The elements of `src` that integers name along `axis`, in the shape of `index`.

    src and index: tiles of one rank and equal in all other dimensions. An index that is negative
    or not below the size of `src` along `axis` is undefined behaviour.
    """
    source, places = tile("tl.gather", src), tile("tl.gather", index)
    if not places.dtype.is_int():
        raise WrongDtype("tl.gather", str(places.type), "integers as indices").about("index")
    rank = len(source.shape)
    if len(places.shape) != rank:
        raise RankMismatch("tl.gather", f"indices of rank {rank}", str(places.type)).about("index")
    along = constants.axis(axis, rank)
    for dim in range(rank):
        if dim != along and source.shape[dim] != places.shape[dim]:
            raise IndexShape(str(places.type), str(source.type), dim, along).about("index")
    e = emitter()
    return e.op(
        "mt.gather",
        block_type(source.dtype, places.shape),
        [source, cast(e, places, dtypes.int32)],
        {"axis": e.i32(along)},
    )


@builtin
def histogram(input: Any, num_bins: Any, mask: Any = None) -> Tensor:
    """How many elements of `input` are 0, 1, ..., num_bins - 1, as a tile of int32.

    input: integers, rank 1. Elements without `mask`, a tile of bools or one of them, and those that
    have no bin are not counted.
    """
    e = emitter()
    value = tile("tl.histogram", input)
    if not value.dtype.is_int() or value.dtype.is_int1():
        raise WrongDtype("tl.histogram", str(value.type), "integers").about("input")
    if len(value.shape) != 1:
        raise RankMismatch("tl.histogram", "a tile of rank 1", str(value.type)).about("input")
    bins = constants.integer(num_bins, "num_bins of tl.histogram")
    constants.tile_size(bins, "num_bins of tl.histogram")
    constants.limit((bins,))
    if value.dtype.primitive_bitwidth < 32:
        value = cast(e, value, dtypes.int32)
    counted = _below(value, bins)
    if unwrap(mask) is not None:
        given = to_tensor(e, unwrap(mask), "the mask of tl.histogram")
        if not given.dtype.is_bool():
            raise WrongDtype("tl.histogram", str(given.type), "a mask of bools").about("mask")
        counted = arithmetic.and_(e, counted, arithmetic.broadcast_to(e, given, value.shape))
    operands = [cast(e, value, dtypes.int32), counted]
    return e.op("mt.histogram", block_type(dtypes.int32, (bins,)), operands)


def _below(value: Tensor, bins: int) -> Tensor:
    """Whether each integer of 32 or 64 bits is one of 0 .. bins - 1."""
    narrow = value.dtype.primitive_bitwidth == 32
    as_unsigned = retag(value, dtypes.uint32 if narrow else dtypes.uint64)
    return arithmetic.compare(emitter(), as_unsigned, bins, "<")
