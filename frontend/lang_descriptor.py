"""Tensor descriptors and block pointers: how kernels make them, and what they do with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minitriton.frontend import arithmetic, constants, lang_atomic
from minitriton.frontend.active import builtin, emitter
from minitriton.frontend.block_access import (
    along,
    arange,
    block_mask,
    block_pointers,
    inside,
    load_block,
    padded_load,
    scalar,
)
from minitriton.frontend.block_values import BlockPointer, Number, TensorDescriptor
from minitriton.frontend.casting import cast
from minitriton.frontend.errors import Mistake, kind_of
from minitriton.frontend.errors_block import (
    BlockBase,
    BlockBytes,
    BlockLength,
    BlockRank,
    BlockScalar,
    GatherBlock,
    GatherColumns,
    GatherRows,
    LastStride,
    NanPadding,
    NegativeSize,
    NotDescriptor,
    OrderPermutation,
    StoredShape,
    StoredType,
    StrideBytes,
    WideOffset,
)
from minitriton.frontend.lang_memory import storage, stored_operand, writable
from minitriton.frontend.lang_program import multiple_of
from minitriton.frontend.values import Tensor, unwrap
from minitriton.ir import dtypes

ALIGNMENT = 16  # bytes: of a descriptor's base and strides, and what a block's row has at least
GATHER_ROWS, GATHER_BYTES = 8, 32  # what a gathered block has at least


@builtin
def make_tensor_descriptor(
    base: Any, shape: Any, strides: Any, block_shape: Any, padding_option: Any = "zero"
) -> TensorDescriptor:
    """A descriptor of an array of 1 to 5 dimensions, read and written in blocks of `block_shape`.

    `base` is aligned to 16 bytes and all strides but the last, which is 1, are multiples of 16
    bytes: that is believed of run-time values. The last dimension of a block has at least 16 bytes.
    Elements outside the array read as 0 ("nan": as NaN) and are not written.
    """
    pointer = _base("tl.make_tensor_descriptor", base)
    sizes = _list(shape)
    rank = len(sizes)
    if not 1 <= rank <= 5:
        raise BlockRank(rank).about("shape")
    steps = _list(strides, rank, "strides")
    padding = constants.choice("padding_option", padding_option, ("zero", "nan"))
    element = pointer.dtype.element_ty
    if padding == "nan" and not element.is_floating():
        raise NanPadding(str(element)).about("padding_option")
    if not (isinstance(steps[-1], int) and steps[-1] == 1):
        raise LastStride(kind_of(steps[-1])).about("strides")
    return TensorDescriptor(
        multiple_of(pointer, ALIGNMENT),
        tuple(_size(size, dtypes.int32) for size in sizes),
        (*(_stride(step, pointer) for step in steps[:-1]), 1),
        _block(block_shape, rank, storage(pointer)),
        padding,
    )


def _stride(value: Any, base: Tensor) -> Number:
    """A stride of a descriptor, with the promise that it is a multiple of 16 bytes."""
    stride = _integer(value, dtypes.int64, "strides")
    unit = max(1, ALIGNMENT // storage(base).itemsize)
    if isinstance(stride, int) and stride % unit:
        raise StrideBytes(stride, str(base.dtype.element_ty)).about("strides")
    promised: Number = multiple_of(stride, unit)
    return promised


@builtin
def load_tensor_descriptor(desc: Any, offsets: Any) -> Tensor:
    """The block of `desc` whose first element has the indices `offsets` (32-bit integers)."""
    descriptor = _descriptor("tl.load_tensor_descriptor", desc)
    first = _offsets(offsets, descriptor.rank)
    every = range(descriptor.rank)
    return load_block(emitter(), descriptor, first, every, descriptor.padding)


@builtin
def store_tensor_descriptor(desc: Any, offsets: Any, value: Any) -> None:
    """Stores `value`, a tile of the block's shape, cast to the element type, at `offsets`."""
    descriptor = _descriptor("tl.store_tensor_descriptor", desc)
    tile = _stored_tile(descriptor, value)
    pointers, mask = _written(descriptor, offsets)
    operands = [pointers, stored_operand(pointers, tile, "value")]
    emitter().effect("mt.store", operands if mask is None else [*operands, mask])


def _stored_tile(descriptor: TensorDescriptor, value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.shape != descriptor.block_shape:
        raise StoredShape(kind_of(value), kind_of(descriptor)).about("value")
    writable("a store", descriptor.base)
    return value


def _written(descriptor: TensorDescriptor, offsets: Any) -> tuple[Tensor, Tensor | None]:
    """Pointers and mask of the block at `offsets`."""
    e = emitter()
    first = _offsets(offsets, descriptor.rank)
    pointers = block_pointers(e, descriptor, first)
    return pointers, block_mask(e, descriptor, first, range(descriptor.rank))


def _atomic(name: str) -> Callable[..., None]:
    update = getattr(lang_atomic, f"atomic_{name}")

    @builtin
    def method(desc: Any, offsets: Any, value: Any) -> None:
        tile = _stored_tile(desc, value)
        if tile.dtype != desc.element:
            raise StoredType(str(tile.dtype), kind_of(desc), str(desc.element)).about("value")
        pointers, mask = _written(desc, offsets)
        update(pointers, tile, mask=mask, sem="relaxed")

    method.__name__ = method.__qualname__ = f"atomic_{name}"
    method.__doc__ = f"Atomic {name} (relaxed) of a tile of the block's type, at `offsets`."
    return method


@builtin
def gather(desc: Any, x_offsets: Any, y_offset: Any) -> Tensor:
    """Rows `x_offsets` (a tile of rank 1) from column `y_offset` on; blocks are [1, columns]."""
    pointers, mask = _rows(desc, x_offsets, y_offset, "a gather")
    return padded_load(emitter(), pointers, mask, desc.padding)


@builtin
def scatter(desc: Any, value: Any, x_offsets: Any, y_offset: Any) -> None:
    """Stores the rows of `value` to rows `x_offsets` from column `y_offset` on."""
    pointers, mask = _rows(desc, x_offsets, y_offset, "a scatter")
    writable("a scatter", desc.base)
    if not isinstance(value, Tensor) or value.shape != pointers.shape:
        block = f"gathered block {dtypes.block_type(desc.element, pointers.shape)}"
        raise StoredShape(kind_of(value), block).about("value")
    emitter().effect("mt.store", [pointers, stored_operand(pointers, value, "value"), mask])


def _rows(
    desc: TensorDescriptor, x_offsets: Any, y_offset: Any, function: str
) -> tuple[Tensor, Tensor]:
    """Pointers and mask of whole rows of blocks."""
    e = emitter()
    if desc.rank != 2 or desc.block_shape[0] != 1:
        raise GatherBlock(function, str(list(desc.block_shape)))
    integers = isinstance(x_offsets, Tensor) and x_offsets.dtype.is_int()
    integers = integers and x_offsets.dtype.bits <= 32
    if not integers or len(x_offsets.shape) != 1 or x_offsets.shape[0] < GATHER_ROWS:
        raise GatherRows(function, kind_of(x_offsets)).about("x_offsets")
    columns, minimum = desc.block_shape[1], GATHER_BYTES // storage(desc.base).itemsize
    if columns < minimum:
        raise GatherColumns(function, columns, str(desc.element), minimum)
    (first,) = _offsets((y_offset,), 1, "y_offset")
    row = along(e, cast(e, x_offsets, dtypes.int32), 0, 2)
    column = arithmetic.add(e, along(e, arange(e, columns), 1, 2), scalar(e, first, dtypes.int32))
    start = arithmetic.mul(e, cast(e, row, dtypes.int64), desc.strides[0])
    pointers = arithmetic.add(e, desc.base, arithmetic.add(e, start, column))
    rows, columns_inside = (
        inside(e, index, size, lowest)
        for index, size, lowest in zip((row, column), desc.shape, (None, first), strict=True)
    )
    return pointers, arithmetic.and_(e, rows, columns_inside)


@builtin
def make_block_ptr(
    base: Any, shape: Any, strides: Any, offsets: Any, block_shape: Any, order: Any
) -> BlockPointer:
    """A pointer to the block of `block_shape` at `offsets` of an array.

    Shape and strides are integers of 64 bits, offsets of 32. `order`, the dimensions from the
    fastest in memory to the slowest, changes nothing here: strides say the same.
    """
    pointer = _base("tl.make_block_ptr", base)
    if pointer.dtype.element_ty.is_bool():
        pointer = cast(
            emitter(), pointer, dtypes.pointer_type(dtypes.int8, const=pointer.dtype.const)
        )
    sizes = _list(shape)
    rank = len(sizes)
    ranking = [constants.integer(x, "each entry of order") for x in _list(order, rank, "order")]
    if sorted(ranking) != list(range(rank)):
        raise OrderPermutation(str(ranking), rank).about("order")
    return BlockPointer(
        pointer,
        tuple(_size(size, _size_type(size)) for size in sizes),
        tuple(_integer(x, dtypes.int64, "strides") for x in _list(strides, rank, "strides")),
        _block(block_shape, rank),
        _offsets(offsets, rank),
        tuple(ranking),
    )


@builtin
def advance(base: Any, offsets: Any) -> BlockPointer:
    """The block pointer `base` moved by `offsets` elements along each dimension."""
    if not isinstance(base, BlockPointer):
        raise NotDescriptor("tl.advance", "block pointer", kind_of(base)).about("base")
    moved = (
        _moved(old, by) for old, by in zip(base.offsets, _offsets(offsets, base.rank), strict=True)
    )
    return base.with_parts((base.base, base.shape, base.strides, tuple(moved)))


def _moved(old: Number, by: Number) -> Number:
    if by == 0:
        return old
    if isinstance(old, int) and isinstance(by, int):
        return old + by
    e = emitter()
    return arithmetic.add(e, *(scalar(e, x, dtypes.int32) for x in (old, by)))


def _base(function: str, base: Any) -> Tensor:
    if not isinstance(base, Tensor) or base.is_tile or not base.dtype.is_ptr():
        raise BlockBase(function, kind_of(base)).about("base")
    return base


def _descriptor(function: str, desc: Any) -> TensorDescriptor:
    if not isinstance(desc, TensorDescriptor):
        raise NotDescriptor(function, "tensor descriptor", kind_of(desc)).about("desc")
    return desc


def _list(value: Any, rank: int | None = None, name: str = "") -> list[Any]:
    """The entries of a list, or the one of a number; `rank` of them, if it is given."""
    plain = unwrap(value)
    items = [unwrap(x) for x in plain] if isinstance(plain, tuple | list) else [plain]
    if rank is not None and len(items) != rank:
        raise BlockLength(name, len(items), rank).about(name)
    return items


def _block(block_shape: Any, rank: int, element: dtypes.dtype | None = None) -> tuple[int, ...]:
    """Dimensions of a block; of a descriptor's for the `element` in memory."""
    try:
        dims = constants.shape(tuple(_list(block_shape, rank, "block_shape")), "block_shape")
    except Mistake as mistake:
        raise mistake.about("block_shape") from None
    if element is not None and dims[-1] * element.itemsize < ALIGNMENT:
        count = dims[-1]
        raise BlockBytes(count, str(element), count * element.itemsize).about("block_shape")
    return dims


def _integer(value: Any, type_: dtypes.dtype, name: str) -> Number:
    """A constant, or a scalar cast to `type_`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, Tensor) and not value.is_tile and value.dtype.is_int():
        return cast(emitter(), value, type_)
    raise BlockScalar(f"each entry of {name}", kind_of(value)).about(name)


def _size(value: Any, type_: dtypes.dtype) -> Number:
    size = _integer(value, type_, "shape")
    if isinstance(size, int) and size < 0:
        raise NegativeSize(size).about("shape")
    return size


def _size_type(value: Any) -> dtypes.dtype:
    """int32 for a scalar that fits, else int64: what indices are compared in."""
    fits = (
        isinstance(value, Tensor)
        and value.dtype.is_int()
        and (value.dtype.bits < 32 or value.dtype == dtypes.int32)
    )
    return dtypes.int32 if fits else dtypes.int64


def _offsets(value: Any, rank: int, name: str = "offsets") -> tuple[Number, ...]:
    found = []
    for item in _list(value, rank, name):
        wide = isinstance(item, Tensor) and item.dtype.is_int() and item.dtype.bits > 32
        if wide or (isinstance(item, int) and not -(2**31) <= item < 2**31):
            raise WideOffset(f"each entry of {name}", kind_of(item)).about(name)
        found.append(_integer(item, dtypes.int32, name))
    return tuple(found)


atomic_add, atomic_min, atomic_max = _atomic("add"), _atomic("min"), _atomic("max")
atomic_and, atomic_or, atomic_xor = _atomic("and"), _atomic("or"), _atomic("xor")
