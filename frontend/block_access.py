"""Loads and stores of blocks: the pointers and the mask that a descriptor or block pointer means.

    address = (base + sum of offset * stride) + sum of index * stride
    mask    = and over dimensions of offset + index < shape [and offset + index >= 0]

with index = 0, 1, ..., block - 1 along each dimension. The scalar part of the address stands apart,
so that a loop moves one pointer. Only offsets that may be negative are compared with zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from minitriton.frontend import arithmetic
from minitriton.frontend.block_values import Number, Window
from minitriton.frontend.casting import cast, like
from minitriton.frontend.values import Tensor
from minitriton.ir import dtypes
from minitriton.ir.dtypes import block_type

if TYPE_CHECKING:
    from minitriton.frontend.emitter import Emitter


def storage(pointer: Tensor) -> dtypes.dtype:
    """Type that lies in memory behind `pointer`: int1 takes a byte."""
    element: dtypes.dtype = pointer.dtype.element_ty
    return dtypes.int8 if element.is_bool() else element


def load_block(
    e: Emitter,
    window: Window,
    offsets: Sequence[Number],
    checked: Iterable[int],
    padding: str,
    attributes: dict[str, Any] | None = None,
) -> Tensor:
    """The block at `offsets`; outside the array in `checked` dimensions it is padding."""
    pointers = block_pointers(e, window, offsets)
    mask = block_mask(e, window, offsets, checked)
    return padded_load(e, pointers, mask, padding, attributes)


def padded_load(
    e: Emitter,
    pointers: Tensor,
    mask: Tensor | None,
    padding: str,
    attributes: dict[str, Any] | None = None,
) -> Tensor:
    """What `pointers` point to where `mask` is true; padding is "zero" or "nan"."""
    type_ = like(pointers.type, storage(pointers))
    operands = [pointers]
    if mask is not None:
        operands += [mask, e.constant(type_, float("nan") if padding == "nan" else 0)]
    loaded = e.op("mt.load", type_, operands, attributes)
    return cast(e, loaded, pointers.dtype.element_ty)


def block_pointers(e: Emitter, window: Window, offsets: Sequence[Number]) -> Tensor:
    """Pointers to the elements of the block at `offsets`."""
    base = _moved(e, window, offsets)
    distances: Tensor | None = None
    type_ = _distance_type(window)
    for dim, (block, stride) in enumerate(zip(window.block_shape, window.strides, strict=True)):
        if block > 1 and stride != 0:
            step = cast(e, along(e, arange(e, block), dim, window.rank), type_)
            if stride != 1:
                step = arithmetic.mul(e, step, scalar(e, stride, type_))
            distances = step if distances is None else arithmetic.add(e, distances, step)
    if distances is None:
        return arithmetic.broadcast_to(e, base, window.block_shape)
    return arithmetic.add(e, base, arithmetic.broadcast_to(e, distances, window.block_shape))


def _distance_type(window: Window) -> dtypes.dtype:
    """int32 where the strides are constants and no distance inside a block needs more."""
    reach = 0
    for block, stride in zip(window.block_shape, window.strides, strict=True):
        reach += (block - 1) * abs(stride) if isinstance(stride, int) else 2**31
    return dtypes.int32 if reach < 2**31 else dtypes.int64


def block_mask(
    e: Emitter, window: Window, offsets: Sequence[Number], checked: Iterable[int]
) -> Tensor | None:
    """Where the block at `offsets` lies inside the array in the `checked` dimensions."""
    masks: list[Tensor] = []
    for dim in checked:
        block, size, offset = window.block_shape[dim], window.shape[dim], offsets[dim]
        if isinstance(size, int) and isinstance(offset, int) and 0 <= offset <= size - block:
            continue
        indices = arithmetic.broadcast_to(e, scalar(e, offset, dtypes.int32), (block,))
        if block > 1:
            indices = arithmetic.add(e, indices, arange(e, block))
        masks.append(along(e, inside(e, indices, size, offset), dim, window.rank))
    if not masks:
        return None
    mask = masks[0]
    for other in masks[1:]:
        mask = arithmetic.and_(e, mask, other)
    return arithmetic.broadcast_to(e, mask, window.block_shape)


def inside(e: Emitter, indices: Tensor, size: Number, lowest: Number | None) -> Tensor:
    """Whether `0 <= indices < size`, elementwise; `lowest` is the first index, if it is one
    scalar that others are not below."""
    wide = size.dtype.bits == 64 if isinstance(size, Tensor) else size >= 2**31
    type_ = dtypes.int64 if wide else dtypes.int32
    below = arithmetic.compare(e, cast(e, indices, type_), scalar(e, size, type_), "<")
    if isinstance(lowest, int) and lowest >= 0:
        return below
    if isinstance(lowest, Tensor) and e.is_non_negative(lowest):
        return below
    return arithmetic.and_(e, below, arithmetic.compare(e, indices, 0, ">="))


def scalar(e: Emitter, value: Number, type_: dtypes.dtype) -> Tensor:
    """`value` as a scalar of `type_`."""
    return e.constant(type_, value) if isinstance(value, int) else cast(e, value, type_)


def _moved(e: Emitter, window: Window, offsets: Sequence[Number]) -> Tensor:
    """The pointer to the element at `offsets`: the base plus one sum in 64 bits."""
    constant, total = 0, None
    for offset, stride in zip(offsets, window.strides, strict=True):
        if isinstance(offset, int) and isinstance(stride, int):
            constant += offset * stride
        elif 0 not in (offset, stride):
            part = scalar(e, offset, dtypes.int64)
            if stride != 1:
                part = arithmetic.mul(e, part, scalar(e, stride, dtypes.int64))
            total = part if total is None else arithmetic.add(e, total, part)
    if constant:
        fixed = e.constant(dtypes.int64, constant)
        total = fixed if total is None else arithmetic.add(e, total, fixed)
    return window.base if total is None else arithmetic.add(e, window.base, total)


def arange(e: Emitter, size: int) -> Tensor:
    """0, 1, ..., size - 1."""
    attributes = {"start": e.i32(0), "end": e.i32(size)}
    return e.op("mt.make_range", block_type(dtypes.int32, (size,)), (), attributes)


def along(e: Emitter, values: Tensor, dim: int, rank: int) -> Tensor:
    """A tile of rank 1 laid along dimension `dim` of a tile of rank `rank`."""
    for axis in range(rank):
        if axis != dim:
            values = arithmetic.expand_dims(e, values, axis)
    return values
