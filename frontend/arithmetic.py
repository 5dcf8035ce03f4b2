"""Operators on tiles and scalars: promotion, broadcasting, and the operation they become.

`RULES` maps each binary operator of the language to its function; constants on both sides are
folded before (see `expressions`), so at least one operand is a run-time value here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minitriton.frontend.casting import bitcast, cast, like, to_tensor
from minitriton.frontend.errors import kind_of
from minitriton.frontend.errors_semantic import (
    CannotBroadcast,
    LiteralRange,
    NegativeUnsigned,
    OperandTypes,
    ShapeMismatch,
    UnaryType,
)
from minitriton.frontend.promotion import computation_type, int_range, literal_type
from minitriton.frontend.values import Tensor, is_number
from minitriton.ir import dtypes
from minitriton.ir.dtypes import AnyType, block_type, dtype

if TYPE_CHECKING:
    from minitriton.frontend.emitter import Emitter

_CAST_HINT = "cast one side with .to(...)"
_POINTER_HINT = "only pointer + int, int + pointer and pointer - int exist; see .to(tl.int64)"


def broadcast_to(e: Emitter, value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`value` repeated to `shape`, right-aligned as in NumPy."""
    if value.shape == shape or not shape:
        if value.shape != shape:
            raise CannotBroadcast(str(list(value.shape)), "a scalar")
        return value
    if not value.is_tile:
        return e.op("mt.splat", block_type(value.dtype, shape), [value])
    if len(value.shape) > len(shape):
        raise CannotBroadcast(str(list(value.shape)), str(list(shape)))
    while len(value.shape) < len(shape):
        value = expand_dims(e, value, 0)
    if value.shape == shape:
        return value
    if any(a not in (1, b) for a, b in zip(value.shape, shape, strict=True)):
        raise CannotBroadcast(str(list(value.shape)), str(list(shape)))
    return e.op("mt.broadcast", block_type(value.dtype, shape), [value])


def expand_dims(e: Emitter, value: Tensor, axis: int) -> Tensor:
    """Inserts a dimension of size 1 before `axis` (0..rank)."""
    shape = (*value.shape[:axis], 1, *value.shape[axis:])
    return e.op("mt.expand_dims", block_type(value.dtype, shape), [value], {"axis": e.i32(axis)})


def common_shape(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    """The shape both broadcast to."""
    rank = max(len(left), len(right))
    a = (1,) * (rank - len(left)) + left
    b = (1,) * (rank - len(right)) + right
    for dim, (x, y) in enumerate(zip(a, b, strict=True)):
        if x != y and 1 not in (x, y):
            raise ShapeMismatch(str(list(left)), str(list(right)), dim)
    return tuple(map(max, a, b))


def broadcast(e: Emitter, *values: Tensor) -> list[Tensor]:
    """All of `values` in their common shape; scalars stay scalars if all are."""
    shape: tuple[int, ...] = ()
    for value in values:
        if value.shape != shape:
            shape = common_shape(shape, value.shape)
    return [broadcast_to(e, value, shape) for value in values]


def operands(
    e: Emitter, left: Any, right: Any, operator: str, broadcasting: bool = True
) -> tuple[Tensor, Tensor]:
    """Both sides in the type of the computation and in their common shape."""
    a_literal, b_literal = is_number(left), is_number(right)
    a_type: Any = literal_type(left) if a_literal else getattr(left, "dtype", None)
    b_type: Any = literal_type(right) if b_literal else getattr(right, "dtype", None)
    known = (a_literal or isinstance(left, Tensor)) and (b_literal or isinstance(right, Tensor))
    if not known or a_type.is_ptr() or b_type.is_ptr():
        hint = _POINTER_HINT if known else ""
        raise OperandTypes(operator, kind_of(left), kind_of(right), hint)
    target = computation_type(a_type, b_type, operator, a_literal, b_literal)
    a = None if a_literal else cast(e, left, target)
    b = None if b_literal else cast(e, right, target)
    if a is None:
        a = _literal(e, left, b.type if b is not None and broadcasting else target)
    if b is None:
        b = _literal(e, right, a.type if broadcasting else target)
    if broadcasting and a.shape != b.shape:
        a, b = broadcast(e, a, b)
    return a, b


def _literal(e: Emitter, value: Any, target: AnyType) -> Tensor:
    """A constant of a scalar or tile type; out-of-range literals are refused."""
    element = target.scalar
    if isinstance(element, dtype) and element.is_int():
        low, high = int_range(element)
        if value < 0 and element.is_int_unsigned():
            raise NegativeUnsigned(value, str(element))
        if not low <= value <= high:
            raise LiteralRange(value, str(element))
    return e.constant(target, value)


def _arith(e: Emitter, a: Tensor, b: Tensor, floats: str, signed: str, unsigned: str) -> Tensor:
    """One `arith` operation; fp8 is computed in fp32, which no hardware adds natively."""
    type_ = a.dtype
    if type_.is_fp8():
        wide = [cast(e, x, dtypes.float32) for x in (a, b)]
        return cast(e, e.op(f"arith.{floats}", wide[0].type, wide), type_)
    name = floats if type_.is_floating() else signed if type_.is_int_signed() else unsigned
    return e.op(f"arith.{name}", a.type, [a, b])


def _add_pointer(e: Emitter, pointer: Tensor, offset: Any, operator: str) -> Tensor:
    if isinstance(offset, int):
        index = e.constant(like(pointer.type, literal_type(offset)), offset)
    else:
        index = to_tensor(e, offset)
    if not index.dtype.is_int():
        raise OperandTypes(operator, kind_of(pointer), kind_of(offset), _POINTER_HINT)
    if operator == "-":
        index = negate(e, index)
    if index.dtype.is_int_unsigned() and index.dtype.bits < 64:
        index = cast(e, index, dtypes.int64)  # addptr takes its offset as signed
    pointer, index = broadcast(e, pointer, index)
    return e.op("mt.addptr", pointer.type, [pointer, index])


def _is_pointer(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype.is_ptr()


def add(e: Emitter, left: Any, right: Any) -> Tensor:
    """`+`, also pointer + integer."""
    if _is_pointer(left) and not _is_pointer(right):
        return _add_pointer(e, left, right, "+")
    if _is_pointer(right) and not _is_pointer(left):
        return _add_pointer(e, right, left, "+")
    return _arith(e, *operands(e, left, right, "+"), "addf", "addi", "addi")


def sub(e: Emitter, left: Any, right: Any) -> Tensor:
    """`-`, also pointer - integer."""
    if _is_pointer(left) and not _is_pointer(right):
        return _add_pointer(e, left, right, "-")
    return _arith(e, *operands(e, left, right, "-"), "subf", "subi", "subi")


def mul(e: Emitter, left: Any, right: Any) -> Tensor:
    """`*`."""
    return _arith(e, *operands(e, left, right, "*"), "mulf", "muli", "muli")


def truediv(e: Emitter, left: Any, right: Any) -> Tensor:
    """`/`: integers divide as fp32."""
    a, b = operands(e, left, right, "/")
    if a.dtype.is_int():
        a, b = cast(e, a, dtypes.float32), cast(e, b, dtypes.float32)
    return e.op("arith.divf", a.type, [a, b])


def _integers(operator: str, left: Any, right: Any) -> None:
    for side in (left, right):
        whole = isinstance(side, int) or (isinstance(side, Tensor) and side.dtype.is_int())
        if not whole:
            raise OperandTypes(operator, kind_of(left), kind_of(right), "it is for integers only")


def floordiv(e: Emitter, left: Any, right: Any) -> Tensor:
    """`//` of integers: truncates towards zero, as C does."""
    _integers("//", left, right)
    return _arith(e, *operands(e, left, right, "//"), "", "divsi", "divui")


def mod(e: Emitter, left: Any, right: Any) -> Tensor:
    """`%`: the sign of the dividend, as in C; floats through remf."""
    return _arith(e, *operands(e, left, right, "%"), "remf", "remsi", "remui")


def _bitwise(symbol: str, signed: str, unsigned: str) -> Any:
    def rule(e: Emitter, left: Any, right: Any) -> Tensor:
        _integers(symbol, left, right)
        return _arith(e, *operands(e, left, right, symbol), "", signed, unsigned)

    rule.__doc__ = f"`{symbol}` of integers."
    return rule


and_ = _bitwise("&", "andi", "andi")
or_ = _bitwise("|", "ori", "ori")
xor = _bitwise("^", "xori", "xori")
shl = _bitwise("<<", "shli", "shli")


def shr(e: Emitter, left: Any, right: Any) -> Tensor:
    """`>>` of integers: arithmetic if what is shifted is signed, whatever the common type is."""
    _integers(">>", left, right)
    a, b = operands(e, left, right, ">>")
    decides = left if isinstance(left, Tensor) else right
    return e.op("arith.shrsi" if decides.dtype.is_int_signed() else "arith.shrui", a.type, [a, b])


# operator: (arith.cmpf predicate, arith.cmpi signed, arith.cmpi unsigned)
_PREDICATES = {
    "==": (1, 0, 0),
    "!=": (13, 1, 1),
    "<": (4, 2, 6),
    "<=": (5, 3, 7),
    ">": (2, 4, 8),
    ">=": (3, 5, 9),
}


def compare(e: Emitter, left: Any, right: Any, operator: str) -> Tensor:
    """A comparison: int1, false where a float operand is NaN (true for `!=`)."""
    a, b = operands(e, left, right, operator)
    if a.dtype.is_fp8():
        a, b = cast(e, a, dtypes.float32), cast(e, b, dtypes.float32)
    floats, signed, unsigned = _PREDICATES[operator]
    result = like(a.type, dtypes.int1)
    if a.dtype.is_floating():
        return e.op("arith.cmpf", result, [a, b], {"predicate": e.i64(floats)})
    predicate = signed if a.dtype.is_int_signed() else unsigned
    return e.op("arith.cmpi", result, [a, b], {"predicate": e.i64(predicate)})


def negate(e: Emitter, value: Tensor) -> Tensor:
    """`-x`: flips the sign of a float (also of zero), subtracts an integer from zero."""
    if value.dtype.is_ptr():
        raise UnaryType("-", kind_of(value))
    if value.dtype.is_fp8():
        return cast(e, negate(e, cast(e, value, dtypes.float32)), value.dtype)
    if value.dtype.is_floating():
        return e.op("arith.negf", value.type, [value])
    return e.op("arith.subi", value.type, [e.constant(value.type, 0), value])


def invert(e: Emitter, value: Tensor) -> Tensor:
    """`~x` of an integer or int1."""
    if not value.dtype.is_int():
        raise UnaryType("~", kind_of(value), "it is for integers only")
    return e.op("arith.xori", value.type, [value, e.constant(value.type, -1)])


def to_bool(e: Emitter, value: Any) -> Tensor:
    """`value != 0` as int1, elementwise."""
    tensor = to_tensor(e, value)
    if tensor.dtype.is_ptr():
        tensor = cast(e, tensor, dtypes.int64)
    return cast(e, tensor, dtypes.int1)


def logical_not(e: Emitter, value: Any) -> Tensor:
    """`not x`, elementwise on tiles."""
    return invert(e, to_bool(e, value))


def select(e: Emitter, condition: Tensor, if_true: Tensor, if_false: Tensor) -> Tensor:
    """arith.select of two values of one type; a tile condition has their shape."""
    return e.op("arith.select", if_true.type, [condition, if_true, if_false])


def is_negative(e: Emitter, value: Tensor) -> Tensor:
    """Whether the sign bit of a float is set (true for -0.0 and negative NaN)."""
    integer = {16: dtypes.int16, 32: dtypes.int32, 64: dtypes.int64}[value.dtype.bits]
    return compare(e, bitcast(e, value, integer), 0, "<")


RULES = {
    "+": add,
    "-": sub,
    "*": mul,
    "/": truediv,
    "//": floordiv,
    "%": mod,
    "&": and_,
    "|": or_,
    "^": xor,
    "<<": shl,
    ">>": shr,
}
