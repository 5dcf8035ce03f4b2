"""Subscripts of tiles: `:` keeps a dimension, `None` adds one of size 1, `...` keeps the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minitriton.frontend.arithmetic import expand_dims
from minitriton.frontend.errors_semantic import ScalarIndex, TileIndex, TooManyIndices
from minitriton.frontend.values import Tensor
from minitriton.ir.dtypes import block_type

if TYPE_CHECKING:
    from minitriton.frontend.emitter import Emitter


def index_tile(e: Emitter, value: Tensor, index: Any) -> Tensor:
    """`value[index]`; a scalar takes only None (it becomes a tile of one element)."""
    items = index if isinstance(index, tuple) else (index,)
    kept = sum(isinstance(item, slice) for item in items)
    if not value.is_tile and (kept or any(item is not None for item in items)):
        raise ScalarIndex(f"scalar {value.type}")
    rank = len(value.shape)
    items = _spread(items, rank - kept)
    axis = 0
    result = value
    for item in items:
        if item is None:
            result = _add_dimension(e, result, axis)
        elif not (isinstance(item, slice) and item == slice(None)):
            raise TileIndex(_describe(item))
        axis += 1
    if axis - items.count(None) > rank:
        raise TooManyIndices(axis - items.count(None), rank)
    return result


def _spread(items: tuple[Any, ...], missing: int) -> tuple[Any, ...]:
    out: list[Any] = []
    for item in items:
        if item is Ellipsis:
            out += [slice(None)] * max(missing, 0)
        else:
            out.append(item)
    return tuple(out)


def _add_dimension(e: Emitter, value: Tensor, axis: int) -> Tensor:
    if not value.is_tile:
        return e.op("mt.splat", block_type(value.dtype, (1,)), [value])
    return expand_dims(e, value, min(axis, len(value.shape)))


def _describe(item: Any) -> str:
    if isinstance(item, slice):
        parts = [item.start, item.stop, item.step]
        shown = ["" if p is None else "..." if isinstance(p, Tensor) else str(p) for p in parts]
        return f"the slice {':'.join(shown[: 3 if parts[2] is not None else 2])}"
    if isinstance(item, Tensor):
        return f"a run-time value ({item.type})"
    return repr(item)
