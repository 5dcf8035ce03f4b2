"""Functions of the language in which the elements of a tile say where others lie."""

from __future__ import annotations

from typing import Any

from minitriton.frontend import constants
from minitriton.frontend.active import builtin, emitter
from minitriton.frontend.casting import cast
from minitriton.frontend.errors_semantic import IndexShape, RankMismatch, WrongDtype
from minitriton.frontend.lang_shape import tile
from minitriton.frontend.values import Tensor
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
