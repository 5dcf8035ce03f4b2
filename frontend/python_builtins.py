"""Python's own functions that kernels may call, and what stands in for them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from minitriton.frontend import arithmetic, constants, ranges
from minitriton.frontend.active import builtin, emitter
from minitriton.frontend.casting import cast
from minitriton.frontend.errors import ConstexprFailed, NotConstexpr, kind_of
from minitriton.frontend.lang_debug import print_
from minitriton.frontend.lang_math import abs as abs_
from minitriton.frontend.lang_math import maximum, minimum
from minitriton.frontend.source import MISSING
from minitriton.frontend.values import Compound, Tensor, constexpr
from minitriton.ir import dtypes


def _constant(name: str, fn: Callable[..., Any], *args: Any) -> Any:
    for arg in args:
        if isinstance(arg, Tensor):
            raise NotConstexpr(f"the argument of {name}()", kind_of(arg))
    try:
        return fn(*args)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConstexprFailed(f"{name}()", str(error)) from None


@builtin
def int_(value: Any) -> Any:
    """Truncates a constant, or casts a run-time scalar to int32 (an integer is kept)."""
    if isinstance(value, Tensor):
        return value if value.dtype.is_int() else cast(emitter(), value, dtypes.int32)
    return _constant("int", int, value)


@builtin
def float_(value: Any) -> Any:
    """A constant as float, or a run-time value cast to fp32 (a float is kept)."""
    if isinstance(value, Tensor):
        return value if value.dtype.is_floating() else cast(emitter(), value, dtypes.float32)
    return _constant("float", float, value)


@builtin
def bool_(value: Any) -> Any:
    """Truth of a constant, or `value != 0`."""
    if isinstance(value, Tensor):
        return arithmetic.to_bool(emitter(), value)
    return _constant("bool", bool, value)


@builtin
def len_(value: Any) -> int:
    """Number of items of a tuple or string, first dimension of a tile."""
    if isinstance(value, Tensor) and value.is_tile:
        return value.shape[0]
    return int(_constant("len", len, value))


@builtin
def min_(*values: Any) -> Any:
    """Smallest of the arguments; run-time scalars through tl.minimum."""
    return _extreme("min", min, minimum, values)


@builtin
def max_(*values: Any) -> Any:
    """Largest of the arguments; run-time scalars through tl.maximum."""
    return _extreme("max", max, maximum, values)


def _extreme(
    name: str, fn: Callable[..., Any], dynamic: Callable[..., Any], values: tuple[Any, ...]
) -> Any:
    if len(values) == 1 and isinstance(values[0], tuple):
        values = values[0]
    if not any(isinstance(value, Tensor) for value in values):
        return _constant(name, fn, values)
    result = values[0]
    for value in values[1:]:
        both_constant = not isinstance(result, Tensor) and not isinstance(value, Tensor)
        result = _constant(name, fn, result, value) if both_constant else dynamic(result, value)
    return result


@builtin
def isinstance_(value: Any, kind: Any) -> bool:
    """As in Python; every compile-time value is an instance of tl.constexpr."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    kinds = tuple(_PYTHON_TYPES.get(k, k) for k in kinds)
    if constexpr in kinds and not isinstance(value, Tensor | Compound):
        return True
    return bool(_constant_check(value, kinds))


def _constant_check(value: Any, kinds: tuple[Any, ...]) -> bool:
    if not all(isinstance(k, type) for k in kinds):
        raise ConstexprFailed("isinstance()", "the second argument must be a type")
    return isinstance(value, kinds)


@builtin
def type_(value: Any) -> Any:
    """The type: of a run-time value the language's."""
    return value.type if isinstance(value, Tensor) else type(value)


@builtin
def getattr_(value: Any, name: Any, default: Any = MISSING) -> Any:
    """As in Python, on compile-time values."""
    if isinstance(value, Tensor):
        raise NotConstexpr("the argument of getattr()", kind_of(value))
    try:
        return getattr(value, _attribute_name(name), *(() if default is MISSING else (default,)))
    except AttributeError as error:
        raise ConstexprFailed("getattr()", str(error)) from None


def _attribute_name(name: Any) -> str:
    if not isinstance(name, str):
        raise NotConstexpr("the name of an attribute", kind_of(name), "a string")
    return name


@builtin
def hasattr_(value: Any, name: Any) -> bool:
    """As in Python."""
    return hasattr(value, _attribute_name(name))


@builtin
def tuple_(values: Any = ()) -> tuple[Any, ...]:
    """A tuple of a tuple's or constant range's items."""
    return tuple(ranges.static_items(values))


@builtin
def sum_(values: Any, start: Any = 0) -> Any:
    """Sum of a tuple's items."""
    total = start
    for value in ranges.static_items(values):
        dynamic = isinstance(total, Tensor) or isinstance(value, Tensor)
        total = (
            arithmetic.add(emitter(), total, value)
            if dynamic
            else _constant("sum", operator.add, total, value)
        )
    return total


@builtin
def zip_(*values: Any) -> tuple[Any, ...]:
    """Tuples of the items at equal positions."""
    return tuple(zip(*(ranges.static_items(v) for v in values), strict=False))


@builtin
def enumerate_(values: Any, start: Any = 0) -> tuple[Any, ...]:
    """Pairs of index and item."""
    return tuple(enumerate(ranges.static_items(values), constants.integer(start, "the start")))


@builtin
def str_(value: Any = "") -> str:
    """Text of a constant."""
    return str(_constant("str", str, value))


@builtin
def slice_(start: Any, stop: Any = None, step: Any = None) -> slice:
    """Python's slice, of constants: an index of tuples."""
    return slice(
        *(None if v is None else constants.integer(v, "a slice") for v in (start, stop, step))
    )


REPLACEMENTS: dict[Any, Any] = {
    slice: slice_,
    int: int_,
    float: float_,
    bool: bool_,
    str: str_,
    len: len_,
    min: min_,
    max: max_,
    abs: abs_,
    sum: sum_,
    zip: zip_,
    enumerate: enumerate_,
    tuple: tuple_,
    list: tuple_,
    range: ranges.range,
    isinstance: isinstance_,
    getattr: getattr_,
    hasattr: hasattr_,
    type: type_,
    print: print_,
}
_PYTHON_TYPES = {list: tuple}
