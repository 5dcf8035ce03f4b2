"""The values a kernel computes with: `Tensor` at run time, everything else at compile time.

While a kernel is compiled, a compile-time value is the bare Python object; `constexpr` is the box
in which host code hands one over. MLIR-free: user programs import this through the language.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from minitriton.ir import dtypes


class Tensor:
    """A run-time value: an SSA `handle` and the language's type of it (scalar, pointer or tile)."""

    __slots__ = ("handle", "type")

    def __init__(self, handle: Any, type_: dtypes.AnyType) -> None:
        self.handle = handle
        self.type = type_

    @property
    def dtype(self) -> Any:
        """Element type: an ir.dtypes.dtype or pointer_type (told apart by `is_ptr()`)."""
        return self.type.scalar

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions; empty for a scalar."""
        return self.type.shape if isinstance(self.type, dtypes.block_type) else ()

    @property
    def is_tile(self) -> bool:
        """Whether it has dimensions."""
        return isinstance(self.type, dtypes.block_type)

    def __bool__(self) -> bool:
        raise TypeError("the truth of a run-time value is not known at compile time")

    def __repr__(self) -> str:
        return f"Tensor({self.type})"


class Compound:
    """A value made of others. Branches and loops join two of them part by part.

    `parts` may hold tuples; the first `steady` of them seldom change in a loop. `fixed` is what two
    values must share to become one.
    """

    __slots__ = ()
    steady = 0

    @property
    def parts(self) -> tuple[Any, ...]:
        """The values it is made of: run-time values, constants and tuples of them."""
        raise AssertionError("a subclass says so")

    @property
    def fixed(self) -> Any:
        """Its compile-time facts."""
        raise AssertionError("a subclass says so")

    def with_parts(self, parts: Sequence[Any]) -> Self:
        """The same made of other parts."""
        raise AssertionError("a subclass says so")


class const:
    """Annotation of a pointer through which a kernel does not store."""


class constexpr:
    """A compile-time constant made by host code; folds under Python's operators."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value: Any = value.value if isinstance(value, constexpr) else value

    @property
    def __mt_constexpr_value__(self) -> Any:
        return self.value

    def __repr__(self) -> str:
        return f"constexpr[{self.value!r}]"

    def __hash__(self) -> int:
        return hash(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __index__(self) -> int:
        return operator.index(self.value)

    def __len__(self) -> int:
        return len(self.value)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.value)

    def __getitem__(self, key: Any) -> Any:
        return self.value[unwrap(key)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.value(*args, **kwargs)


def unwrap(value: Any) -> Any:
    """The bare value of a constexpr, anything else as it is."""
    return value.value if isinstance(value, constexpr) else value


def _folding(fn: Callable[..., Any], reflected: bool = False) -> Callable[..., constexpr]:
    def fold(self: constexpr, other: Any) -> constexpr:
        left, right = unwrap(self), unwrap(other)
        return constexpr(fn(right, left) if reflected else fn(left, right))

    return fold


def _folding_unary(fn: Callable[[Any], Any]) -> Callable[[constexpr], constexpr]:
    return lambda self: constexpr(fn(self.value))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift"):
    setattr(constexpr, f"__{_name}__", _folding(getattr(operator, _name)))
    setattr(constexpr, f"__r{_name}__", _folding(getattr(operator, _name), reflected=True))
for _name, _fn in (("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)):
    setattr(constexpr, f"__{_name}__", _folding(_fn))
    setattr(constexpr, f"__r{_name}__", _folding(_fn, reflected=True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(constexpr, f"__{_name}__", _folding(getattr(operator, _name)))
for _name in ("neg", "pos", "invert"):
    setattr(constexpr, f"__{_name}__", _folding_unary(getattr(operator, _name)))


class PropagateNan(enum.Enum):
    """Whether minimum, maximum and clamp return NaN when an operand is NaN."""

    NONE = 0
    ALL = 0xFFFF


def is_number(value: Any) -> bool:
    """Whether a compile-time value can become a scalar."""
    return isinstance(value, bool | int | float)


def same_constant(left: Any, right: Any) -> bool:
    """Equality of compile-time values in which 1, 1.0 and True differ."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(map(same_constant, left, right))
    if isinstance(left, Tensor):
        return left.handle == right.handle
    if isinstance(left, float):
        return left.hex() == right.hex()
    return bool(left == right)


def rebuild(like: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    """A tuple of the class of `like` (namedtuples keep their class)."""
    return type(like)(*items) if hasattr(like, "_fields") else tuple(items)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Run-time values inside a possibly nested tuple or compound value."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Compound):
        yield from tensors_in(value.parts)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)


def holds_tensor(value: Any) -> bool:
    """Whether a value is, or contains in a tuple, a run-time value."""
    return next(tensors_in(value), None) is not None
