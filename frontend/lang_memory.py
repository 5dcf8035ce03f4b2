"""tl.load and tl.store."""

from __future__ import annotations

from typing import Any

from minitriton.frontend import constants
from minitriton.frontend.active import builtin, emitter
from minitriton.frontend.arithmetic import broadcast_to
from minitriton.frontend.block_access import block_mask, block_pointers, load_block, storage
from minitriton.frontend.block_values import BlockPointer, TensorDescriptor
from minitriton.frontend.casting import cast, like, to_tensor
from minitriton.frontend.errors import kind_of
from minitriton.frontend.errors_block import (
    BlockPointerMask,
    BoundaryDimension,
    DescriptorAsPointer,
    NanPadding,
    NotBlockPointer,
    StoredShape,
    StoredType,
)
from minitriton.frontend.errors_semantic import (
    ConstPointer,
    MaskType,
    NotPointer,
    OtherWithoutMask,
    ScalarPointerBlock,
)
from minitriton.frontend.values import Tensor, is_number, unwrap

_LOAD_CACHE = ("", ".ca", ".cg", ".cs", ".cv")
_STORE_CACHE = ("", ".wb", ".cg", ".cs", ".wt")
_EVICTION = ("", "evict_first", "evict_last", "evict_normal")
_PADDING = ("", "zero", "nan")


def require_pointer(function: str, pointer: Any) -> Tensor:
    """`pointer` if it is one (scalar or tile)."""
    if isinstance(pointer, TensorDescriptor):
        raise DescriptorAsPointer(function, kind_of(pointer)).about("pointer")
    if not isinstance(pointer, Tensor) or not pointer.dtype.is_ptr():
        raise NotPointer(function, kind_of(pointer)).about("pointer")
    return pointer


def fitting(pointer: Tensor, value: Any, what: str) -> Tensor:
    """`value` broadcast to the shape of `pointer`."""
    e = emitter()
    tensor = to_tensor(e, value, what)
    if tensor.is_tile and not pointer.is_tile:
        raise ScalarPointerBlock(f"'{what}'", kind_of(tensor)).about(what)
    return broadcast_to(e, tensor, pointer.shape)


def stored_operand(pointer: Tensor, value: Any, what: str) -> Tensor:
    """`value` in the shape of `pointer` and the type that lies in memory."""
    e = emitter()
    element = pointer.dtype.element_ty
    if is_number(value) and not (element.is_int() and isinstance(value, float)):
        plain = float(value) if element.is_floating() else int(value)
        if element.is_bool():
            plain = int(bool(value))
        return e.constant(like(pointer.type, storage(pointer)), plain)
    tensor = fitting(pointer, value, what)
    return cast(e, cast(e, tensor, element), storage(pointer))


def mask_operand(pointer: Tensor, mask: Any) -> Tensor:
    """A mask as int1 in the shape of `pointer`."""
    value = unwrap(mask)
    if is_number(value):
        value = bool(value)
    elif not isinstance(value, Tensor) or not value.dtype.is_bool():
        raise MaskType(kind_of(value)).about("mask")
    return fitting(pointer, value, "mask")


def access_attributes(cache: Any, eviction: Any, allowed: tuple[str, ...]) -> dict[str, Any]:
    """Attributes for cache and eviction hints; the defaults have none."""
    e = emitter()
    attributes = {}
    modifier = constants.choice("cache_modifier", cache, allowed)
    if modifier:
        attributes["cache"] = e.string(modifier[1:])
    policy = constants.choice("eviction_policy", eviction, _EVICTION)
    if policy in ("evict_first", "evict_last"):
        attributes["evict"] = e.string(policy)
    return attributes


@builtin
def load(
    pointer: Any,
    mask: Any = None,
    other: Any = None,
    boundary_check: Any = (),
    padding_option: Any = "",
    cache_modifier: Any = "",
    eviction_policy: Any = "",
    volatile: Any = False,
) -> Tensor:
    """Loads the elements `pointer` points to.

    Where `mask` is false nothing is read and the result is `other`, undefined without it. Both
    broadcast to the shape of `pointer`; `other` is cast to the element type. A block pointer takes
    `boundary_check`, dimensions in which elements outside the array are padding, instead.
    """
    e = emitter()
    attributes = access_attributes(cache_modifier, eviction_policy, _LOAD_CACHE)
    if constants.flag(volatile, "volatile"):
        attributes["volatile"] = e.unit()
    padding = "" if unwrap(padding_option) is None else padding_option
    padding = constants.choice("padding_option", padding, _PADDING)
    if isinstance(pointer, BlockPointer):
        if mask is not None or other is not None:
            raise BlockPointerMask().about("other" if mask is None else "mask")
        if padding == "nan" and not pointer.element.is_floating():
            raise NanPadding(str(pointer.element)).about("padding_option")
        checked = _checked_dimensions(pointer, boundary_check)
        return load_block(e, pointer, pointer.offsets, checked, padding, attributes)
    pointer = require_pointer("tl.load", pointer)
    if unwrap(boundary_check) not in ((), [], None) or padding:
        raise NotBlockPointer(kind_of(pointer))
    element, stored = pointer.dtype.element_ty, storage(pointer)
    operands = [pointer]
    if mask is not None:
        operands.append(mask_operand(pointer, mask))
        if other is not None:
            operands.append(stored_operand(pointer, unwrap(other), "other"))
    elif other is not None:
        raise OtherWithoutMask().about("other")
    result = e.op("mt.load", like(pointer.type, stored), operands, attributes)
    return cast(e, result, element)


@builtin
def store(
    pointer: Any,
    value: Any,
    mask: Any = None,
    boundary_check: Any = (),
    cache_modifier: Any = "",
    eviction_policy: Any = "",
) -> None:
    """Stores `value`, cast to the element type and broadcast to `pointer`, where `mask` is true.

    Through a block pointer the value has the block's type, or is a number; elements outside the
    array in the dimensions of `boundary_check` are not written.
    """
    attributes = access_attributes(cache_modifier, eviction_policy, _STORE_CACHE)
    if isinstance(pointer, BlockPointer):
        if mask is not None:
            raise BlockPointerMask().about("mask")
        _store_block(pointer, unwrap(value), boundary_check, attributes)
        return
    pointer = require_pointer("tl.store", pointer)
    if unwrap(boundary_check) not in ((), [], None):
        raise NotBlockPointer(kind_of(pointer))
    writable("tl.store", pointer)
    operands = [pointer, stored_operand(pointer, unwrap(value), "value")]
    if mask is not None:
        operands.append(mask_operand(pointer, mask))
    emitter().effect("mt.store", operands, attributes)


def writable(function: str, pointer: Tensor) -> None:
    """A mistake if `pointer` was declared const."""
    if pointer.dtype.const:
        raise ConstPointer(function, str(pointer.dtype))


def _checked_dimensions(pointer: BlockPointer, boundary_check: Any) -> list[int]:
    """The dimensions that `boundary_check` names, in order."""
    plain = unwrap(boundary_check)
    items = () if plain is None else plain if isinstance(plain, tuple | list) else (plain,)
    dims = [constants.integer(item, "each dimension of boundary_check") for item in items]
    for dim in dims:
        if not 0 <= dim < pointer.rank:
            raise BoundaryDimension(dim, pointer.rank).about("boundary_check")
    return sorted(set(dims))


def _store_block(
    pointer: BlockPointer, value: Any, boundary_check: Any, attributes: dict[str, Any]
) -> None:
    e = emitter()
    writable("tl.store", pointer.base)
    if isinstance(value, Tensor):
        if value.is_tile and value.shape != pointer.block_shape:
            raise StoredShape(kind_of(value), kind_of(pointer)).about("value")
        if value.dtype != pointer.element:
            raise StoredType(str(value.dtype), kind_of(pointer), str(pointer.element)).about(
                "value"
            )
    checked = _checked_dimensions(pointer, boundary_check)
    pointers = block_pointers(e, pointer, pointer.offsets)
    operands = [pointers, stored_operand(pointers, value, "value")]
    mask = block_mask(e, pointer, pointer.offsets, checked)
    e.effect("mt.store", operands if mask is None else [*operands, mask], attributes)
