"""Attributes and methods of values in a kernel: `x.shape`, `x.T`, `x.to(...)`, `mod.name`."""

from __future__ import annotations

import math
import operator
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minitriton.frontend import (
    lang_atomic,
    lang_create,
    lang_descriptor,
    lang_indexed,
    lang_math,
    lang_memory,
    lang_reduce,
    lang_shape,
    lang_sort,
)
from minitriton.frontend.block_values import BlockPointer, TensorDescriptor, Window
from minitriton.frontend.casting import to_tensor
from minitriton.frontend.errors import UnknownAttribute, kind_of
from minitriton.frontend.promotion import literal_type
from minitriton.frontend.values import Tensor, is_number, unwrap
from minitriton.ir import dtypes

if TYPE_CHECKING:
    from minitriton.frontend.emitter import Emitter


@dataclass(frozen=True)
class BoundMethod:
    """A function of the language with its first argument."""

    function: Callable[..., Any]
    owner: Any


PROPERTIES: dict[str, Callable[[Tensor], Any]] = {
    "dtype": lambda x: x.dtype,
    "type": lambda x: x.type,
    "shape": lambda x: x.shape,
    "ndim": lambda x: len(x.shape),
    "rank": lambda x: len(x.shape),
    "numel": lambda x: math.prod(x.shape),
    "T": lambda x: lang_shape.trans(x),
}

METHODS: dict[str, Callable[..., Any]] = {
    name: getattr(module, name)
    for module, names in (
        (lang_create, "to cast"),
        (
            lang_shape,
            "reshape view trans permute expand_dims broadcast_to ravel split flip squeeze "
            "unsqueeze item",
        ),
        (
            lang_math,
            "abs exp exp2 log log2 sin cos sqrt rsqrt sqrt_rn floor ceil erf sigmoid "
            "softmax cdiv logical_and logical_or",
        ),
        (
            lang_reduce,
            "sum max min argmax argmin xor_sum reduce_or reduce associative_scan cumsum cumprod",
        ),
        (lang_indexed, "gather histogram"),
        (lang_sort, "sort"),
        (lang_memory, "store"),
        (
            lang_atomic,
            "atomic_add atomic_max atomic_min atomic_and atomic_or atomic_xor "
            "atomic_xchg atomic_cas",
        ),
    )
    for name in names.split()
}

_OF_WINDOWS: dict[str, Callable[[Any], Any]] = {
    name: operator.attrgetter(name)
    for name in ("base", "shape", "strides", "block_shape", "block_type")
}
_UPDATES = "gather scatter atomic_add atomic_min atomic_max atomic_and atomic_or atomic_xor"
# attributes and methods of descriptors and block pointers
WINDOWS: dict[type, tuple[dict[str, Callable[[Any], Any]], dict[str, Callable[..., Any]]]] = {
    TensorDescriptor: (
        {**_OF_WINDOWS, "dtype": lambda x: x.element, "type": lambda x: x.block_type},
        {
            "load": lang_descriptor.load_tensor_descriptor,
            "store": lang_descriptor.store_tensor_descriptor,
            **{name: getattr(lang_descriptor, name) for name in _UPDATES.split()},
        },
    ),
    BlockPointer: (
        {
            **_OF_WINDOWS,
            "offsets": lambda x: x.offsets,
            "dtype": lambda x: x.base.dtype,
            "type": lambda x: dtypes.pointer_type(x.block_type, const=x.base.dtype.const),
        },
        {"advance": lang_descriptor.advance, "store": lang_memory.store},
    ),
}


def attribute_of(e: Emitter, owner: Any, name: str) -> Any:
    """Value of `owner.name` in a kernel."""
    if isinstance(owner, Tensor):
        if name in PROPERTIES:
            return PROPERTIES[name](owner)
        if name in METHODS:
            return BoundMethod(METHODS[name], owner)
        raise UnknownAttribute(kind_of(owner), name, (*PROPERTIES, *METHODS))
    if isinstance(owner, Window):
        properties, methods = WINDOWS[type(owner)]
        if name in properties:
            return properties[name](owner)
        if name in methods:
            return BoundMethod(methods[name], owner)
        raise UnknownAttribute(kind_of(owner), name, (*properties, *methods))
    if is_number(owner):
        if name == "value":
            return owner
        if name in ("dtype", "type"):
            return literal_type(owner)
        if name == "shape":
            return ()
        if name in METHODS:
            return BoundMethod(METHODS[name], to_tensor(e, owner))
    elif name == "value" and not hasattr(owner, "value"):
        return owner  # every compile-time value is a constexpr
    if not name.startswith("__"):
        found = getattr(owner, name, _MISSING)
        if found is not _MISSING:
            return unwrap(found)
    what = f"module '{owner.__name__}'" if isinstance(owner, types.ModuleType) else kind_of(owner)
    raise UnknownAttribute(what, name, tuple(n for n in dir(owner) if not n.startswith("_")))


_MISSING = object()
