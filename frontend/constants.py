"""Checks of arguments that must be known while compiling: integers, shapes, axes, options."""

from __future__ import annotations

from math import prod
from typing import Any

from minitriton.frontend.errors import NotConstexpr, kind_of
from minitriton.frontend.errors_semantic import (
    AxisRange,
    BadOption,
    TileSize,
    TooManyElements,
)
from minitriton.frontend.values import unwrap
from minitriton.ir import dtypes
from minitriton.ir.linear_layout import SIZE_STEP, is_tile_size

MAX_ELEMENTS = 1 << 20


def integer(value: Any, what: str) -> int:
    """A compile-time int."""
    plain = unwrap(value)
    if isinstance(plain, bool) or not isinstance(plain, int):
        raise NotConstexpr(what, kind_of(plain), "an integer known at compile time")
    return plain


def flag(value: Any, what: str) -> bool:
    """A compile-time bool."""
    plain = unwrap(value)
    if not isinstance(plain, bool | int):
        raise NotConstexpr(what, kind_of(plain), "True or False, known at compile time")
    return bool(plain)


def shape(value: Any, what: str = "a shape") -> tuple[int, ...]:
    """A tile's shape: sizes that a tile can have, at most MAX_ELEMENTS elements; an int is rank
    1."""
    plain = unwrap(value)
    items = tuple(plain) if isinstance(plain, tuple | list) else (plain,)
    dims = tuple(integer(item, f"each dimension of {what}") for item in items)
    for dim in dims:
        tile_size(dim, f"each dimension of {what}")
    limit(dims)
    return dims


def tile_size(value: int, what: str) -> None:
    """A mistake unless a tile can have so many elements along a dimension."""
    if not is_tile_size(value):
        raise TileSize(what, value, SIZE_STEP)


def limit(dims: tuple[int, ...]) -> None:
    """A mistake if a tile of this shape is too large."""
    if prod(dims) > MAX_ELEMENTS:
        raise TooManyElements(str(list(dims)), prod(dims), MAX_ELEMENTS)


def axis(value: Any, rank: int, what: str = "axis") -> int:
    """A dimension's index, 0..rank-1; negative ones count from the end."""
    plain = integer(value, what)
    if not -rank <= plain < rank:
        raise AxisRange(plain, rank)
    return plain % rank


def choice(option: str, value: Any, allowed: tuple[str, ...]) -> str:
    """One of the allowed strings."""
    plain = unwrap(value)
    if not isinstance(plain, str) or plain not in allowed:
        raise BadOption(option, plain, allowed)
    return plain


def element_type(value: Any, what: str = "dtype") -> Any:
    """A scalar or pointer type; strings are parsed."""
    plain = unwrap(value)
    if isinstance(plain, str):
        try:
            return dtypes.parse(plain)
        except ValueError:
            raise BadOption(what, plain, tuple(t.name for t in dtypes.ALL)) from None
    if isinstance(plain, dtypes.dtype | dtypes.pointer_type):
        return plain
    if isinstance(plain, dtypes.block_type):
        return plain.element_ty
    raise NotConstexpr(what, kind_of(plain), "a type such as tl.float32")
