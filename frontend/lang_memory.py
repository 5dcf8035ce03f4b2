"""tl.load and tl.store."""

from __future__ import annotations

from typing import Any

from minitriton.frontend import constants
from minitriton.frontend.active import builtin, emitter
from minitriton.frontend.arithmetic import broadcast_to
from minitriton.frontend.casting import cast, like, to_tensor
from minitriton.frontend.errors import kind_of
from minitriton.frontend.errors_semantic import (
    BlockPointers,
    ConstPointer,
    MaskType,
    NotPointer,
    OtherWithoutMask,
    ScalarPointerBlock,
)
from minitriton.frontend.values import Tensor, is_number, unwrap
from minitriton.ir import dtypes

_LOAD_CACHE = ("", ".ca", ".cg", ".cs", ".cv")
_STORE_CACHE = ("", ".wb", ".cg", ".cs", ".wt")
_EVICTION = ("", "evict_first", "evict_last", "evict_normal")


def require_pointer(function: str, pointer: Any) -> Tensor:
    """`pointer` if it is one (scalar or tile)."""
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


def storage(pointer: Tensor) -> dtypes.dtype:
    """Type that lies in memory behind `pointer`: int1 takes a byte."""
    element = pointer.dtype.element_ty
    return dtypes.int8 if element.is_bool() else element


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
    broadcast to the shape of `pointer`; `other` is cast to the element type.
    """
    pointer = require_pointer("tl.load", pointer)
    if unwrap(boundary_check) not in ((), []) or unwrap(padding_option) != "":
        raise BlockPointers()
    e = emitter()
    element, stored = pointer.dtype.element_ty, storage(pointer)
    operands = [pointer]
    if mask is not None:
        operands.append(mask_operand(pointer, mask))
        if other is not None:
            operands.append(stored_operand(pointer, unwrap(other), "other"))
    elif other is not None:
        raise OtherWithoutMask().about("other")
    attributes = access_attributes(cache_modifier, eviction_policy, _LOAD_CACHE)
    if constants.flag(volatile, "volatile"):
        attributes["volatile"] = e.unit()
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
    """Stores `value`, cast to the element type and broadcast to `pointer`, where `mask` is true."""
    pointer = require_pointer("tl.store", pointer)
    if unwrap(boundary_check) not in ((), []):
        raise BlockPointers()
    if pointer.dtype.const:
        raise ConstPointer("tl.store", str(pointer.dtype))
    e = emitter()
    operands = [pointer, stored_operand(pointer, unwrap(value), "value")]
    if mask is not None:
        operands.append(mask_operand(pointer, mask))
    e.effect("mt.store", operands, access_attributes(cache_modifier, eviction_policy, _STORE_CACHE))
