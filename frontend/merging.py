"""Joins the values that one name has on two paths into one value of one type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from minitriton.frontend.promotion import int_range, integer_promote, literal_type
from minitriton.frontend.values import Compound, Tensor, is_number, rebuild, same_constant
from minitriton.ir.dtypes import AnyType, dtype

if TYPE_CHECKING:
    from minitriton.frontend.emitter import Emitter


class Mismatch(Exception):
    """Two values have no common type."""


class Slot:
    """Placeholder for a run-time value of `type` in a joined value."""

    __slots__ = ("type",)

    def __init__(self, type_: AnyType) -> None:
        self.type = type_


def join(left: Any, right: Any) -> Any:
    """The common form: a constant where both agree, a Slot where a run-time value is needed."""
    if isinstance(left, Slot):
        left = Tensor(None, left.type)
    if isinstance(left, tuple) and isinstance(right, tuple) and len(left) == len(right):
        if type(left) is not type(right):
            raise Mismatch
        return rebuild(left, [join(a, b) for a, b in zip(left, right, strict=True)])
    if isinstance(left, Compound) and isinstance(right, Compound):
        if type(left) is not type(right) or left.fixed != right.fixed:
            raise Mismatch
        return left.with_parts(_join_parts(left.parts, right.parts))
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if left.type != right.type:
            raise Mismatch
        return Slot(left.type)
    if isinstance(left, Tensor) and is_number(right):
        return Slot(_holding(right, left.type))
    if isinstance(right, Tensor) and is_number(left):
        return Slot(_holding(left, right.type))
    if same_constant(left, right):
        return left
    if is_number(left) and is_number(right):
        a, b = literal_type(left), literal_type(right)
        if a.kind in ("int", "uint") and b.kind in ("int", "uint"):
            return Slot(integer_promote(a, b))
        if a.kind == b.kind:
            return Slot(max(a, b, key=lambda t: t.bits))
    raise Mismatch


def _join_parts(left: tuple[Any, ...], right: tuple[Any, ...]) -> list[Any]:
    """Parts of two compound values: a run-time value that both have stays in its place."""
    joined: list[Any] = []
    for a, b in zip(left, right, strict=True):
        if isinstance(a, tuple):
            joined.append(tuple(_join_parts(a, b)))
        elif isinstance(a, Tensor) and isinstance(b, Tensor) and a.handle == b.handle:
            joined.append(a)
        else:
            joined.append(join(a, b))
    return joined


def _holding(value: bool | int | float, type_: AnyType) -> AnyType:
    """`type_` if it is a scalar that a constant of this kind becomes without loss of meaning."""
    if not isinstance(type_, dtype):
        raise Mismatch
    kind = literal_type(value).kind
    if kind == "float" and type_.is_floating():
        return type_
    if kind == "bool" and type_.is_bool():
        return type_
    if kind in ("int", "uint") and type_.kind in ("int", "uint"):
        low, high = int_range(type_)
        if low <= value <= high:
            return type_
    raise Mismatch


def slots(form: Any) -> Iterator[AnyType]:
    """Types of the run-time values in a joined form, in order."""
    if isinstance(form, Slot):
        yield form.type
    elif isinstance(form, Compound):
        yield from slots(form.parts)
    elif isinstance(form, tuple):
        for item in form:
            yield from slots(item)


def fill(form: Any, tensors: Iterator[Tensor]) -> Any:
    """A value of the joined form with `tensors` in its slots."""
    if isinstance(form, Slot):
        return next(tensors)
    if isinstance(form, Compound):
        return form.with_parts(fill(form.parts, tensors))
    if isinstance(form, tuple) and any(True for _ in slots(form)):
        return rebuild(form, [fill(item, tensors) for item in form])
    return form


def lower(e: Emitter, value: Any, form: Any) -> Iterator[Tensor]:
    """The run-time values of `value` for the slots of `form`; constants are made where needed."""
    if isinstance(form, Slot):
        yield value if isinstance(value, Tensor) else e.constant(form.type, value)
    elif isinstance(form, Compound):
        yield from lower(e, value.parts, form.parts)
    elif isinstance(form, tuple):
        for item, part in zip(value, form, strict=True):
            yield from lower(e, item, part)


def form_of(value: Any) -> Any:
    """The joined form of one value alone."""
    if isinstance(value, Tensor):
        return Slot(value.type)
    if isinstance(value, Compound):
        steady, moving = value.parts[: value.steady], value.parts[value.steady :]
        return value.with_parts((*steady, *map(form_of, moving)))
    if isinstance(value, tuple) and any(isinstance(x, Tensor | Compound | tuple) for x in value):
        return rebuild(value, [form_of(item) for item in value])
    return value


def same_form(left: Any, right: Any) -> bool:
    """Whether two forms have equal slots and equal constants."""
    if isinstance(left, Slot) and isinstance(right, Slot):
        return left.type == right.type
    if isinstance(left, Compound) and isinstance(right, Compound):
        return same_form(left.parts, right.parts)
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(same_form, left, right))
    return same_constant(left, right)


def describe(value: Any) -> str:
    """A value in a message: its type, or the literal."""
    if isinstance(value, Tensor | Slot):
        return str(value.type)
    if isinstance(value, Compound):
        return str(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(describe, value))})"
    if is_number(value):
        return f"{value!r} ({literal_type(value)})"
    return repr(value) if value is None or isinstance(value, str) else type(value).__name__
