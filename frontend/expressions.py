"""Rules for expressions: constants fold in Python, run-time values become operations."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from typing import Any

from minitriton.frontend import arithmetic, indexing
from minitriton.frontend.assignments import assign
from minitriton.frontend.block_values import Window
from minitriton.frontend.branches import dynamic_ternary, require_condition
from minitriton.frontend.errors import (
    ConstexprFailed,
    NotConstexpr,
    NotIterable,
    UnsupportedSyntax,
    kind_of,
)
from minitriton.frontend.errors_block import WindowIndex
from minitriton.frontend.errors_semantic import OperandTypes, UnaryType
from minitriton.frontend.frame import Frame
from minitriton.frontend.methods import attribute_of
from minitriton.frontend.ranges import static_items
from minitriton.frontend.values import Tensor, holds_tensor, is_number, unwrap

_BINARY: dict[type, tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
    ast.FloorDiv: ("//", operator.floordiv),
    ast.Mod: ("%", operator.mod),
    ast.Pow: ("**", operator.pow),
    ast.LShift: ("<<", operator.lshift),
    ast.RShift: (">>", operator.rshift),
    ast.BitAnd: ("&", operator.and_),
    ast.BitOr: ("|", operator.or_),
    ast.BitXor: ("^", operator.xor),
    ast.MatMult: ("@", operator.matmul),
}
_COMPARE: dict[type, tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Eq: ("==", operator.eq),
    ast.NotEq: ("!=", operator.ne),
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
}
_REMEDIES = {
    "window": "give the indices to its load and store, or move a block pointer with tl.advance",
    "@": "use tl.dot(a, b)",
    "**": "write x * x, or tl.exp2(y * tl.log2(x)), or libdevice.pow",
}


def fold(what: str, fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)` at compile time; Python's exception becomes the user's error."""
    try:
        return unwrap(fn(*args))
    except (ArithmeticError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise ConstexprFailed(what, f"{type(error).__name__}: {error}") from None


def binary(frame: Frame, kind: type, left: Any, right: Any) -> Any:
    """`left <kind> right` for an operator class of `ast`."""
    symbol, fn = _BINARY[kind]
    if isinstance(left, Window) or isinstance(right, Window):
        raise OperandTypes(symbol, kind_of(left), kind_of(right), _REMEDIES["window"])
    if not isinstance(left, Tensor) and not isinstance(right, Tensor):
        return fold(f"'{symbol}'", fn, left, right)
    rule = arithmetic.RULES.get(symbol)
    if rule is None:
        raise OperandTypes(symbol, kind_of(left), kind_of(right), _REMEDIES.get(symbol, ""))
    return rule(frame.e, left, right)


def _bin_op(frame: Frame, node: ast.BinOp) -> Any:
    left, right = frame.eval(node.left), frame.eval(node.right)
    frame.mark(node)
    return binary(frame, type(node.op), left, right)


def _unary_op(frame: Frame, node: ast.UnaryOp) -> Any:
    value = frame.eval(node.operand)
    frame.mark(node)
    match node.op:
        case ast.Not():
            if isinstance(value, Tensor):
                return arithmetic.logical_not(frame.e, value)
            return not value
        case ast.USub():
            if isinstance(value, Tensor):
                return arithmetic.negate(frame.e, value)
            return fold("'-'", operator.neg, value)
        case ast.Invert():
            if isinstance(value, Tensor):
                return arithmetic.invert(frame.e, value)
            return fold("'~'", lambda x: (not x) if isinstance(x, bool) else ~x, value)
    if isinstance(value, Tensor) and value.dtype.is_ptr():
        raise UnaryType("+", kind_of(value))
    return value


def _compare(frame: Frame, node: ast.Compare) -> Any:
    left = frame.eval(node.left)
    result: Any = True
    for op, comparator in zip(node.ops, node.comparators, strict=True):
        right = frame.eval(comparator)
        frame.mark(node)
        part = _compare_pair(frame, op, left, right)
        if not isinstance(result, Tensor) and not isinstance(part, Tensor):
            result = result and part
        elif result is True:
            result = part
        else:
            result = arithmetic.and_(frame.e, result, part)
        if result is False:
            return False
        left = right
    return result


def _compare_pair(frame: Frame, op: ast.cmpop, left: Any, right: Any) -> Any:
    if isinstance(op, ast.Is | ast.IsNot):
        same = left is right or (is_number(left) and is_number(right) and left == right)
        return same == isinstance(op, ast.Is)
    if isinstance(op, ast.In | ast.NotIn):
        if holds_tensor((left, right)):
            raise OperandTypes("in", kind_of(left), kind_of(right), "compare with == instead")
        return fold("'in'", lambda a, b: (a in b) == isinstance(op, ast.In), left, right)
    symbol, fn = _COMPARE[type(op)]
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return arithmetic.compare(frame.e, left, right, symbol)
    return fold(f"'{symbol}'", fn, left, right)


def _bool_op(frame: Frame, node: ast.BoolOp) -> Any:
    """Constants short-circuit; run-time operands are combined bit by bit, all evaluated."""
    conjunction = isinstance(node.op, ast.And)
    result: Any = conjunction
    for operand in node.values:
        value = frame.eval(operand)
        if not isinstance(result, Tensor):
            if bool(result) != conjunction:
                return result
            result = value
            continue
        frame.mark(node)
        if not isinstance(value, Tensor):
            if bool(value) == conjunction:
                continue
            return not conjunction
        rule = arithmetic.and_ if conjunction else arithmetic.or_
        sides = (arithmetic.to_bool(frame.e, side) for side in (result, value))
        result = rule(frame.e, *sides)
    return result


def _if_exp(frame: Frame, node: ast.IfExp) -> Any:
    test = frame.eval(node.test)
    frame.mark(node.test)
    condition = require_condition(frame, test, "a conditional expression")
    if not isinstance(condition, Tensor):
        return frame.eval(node.body if condition else node.orelse)
    frame.mark(node)
    return dynamic_ternary(frame, node, condition)


def _name(frame: Frame, node: ast.Name) -> Any:
    return frame.read(node.id)


def _constant(frame: Frame, node: ast.Constant) -> Any:
    if isinstance(node.value, complex):
        raise UnsupportedSyntax("a complex number", "")
    return node.value


def _tuple(frame: Frame, node: ast.Tuple | ast.List) -> tuple[Any, ...]:
    return tuple(elements(frame, node.elts))


def elements(frame: Frame, nodes: Sequence[ast.expr]) -> list[Any]:
    """Values of a list of expressions; `*tuple` is spread."""
    values: list[Any] = []
    for node in nodes:
        if isinstance(node, ast.Starred):
            value = frame.eval(node.value)
            if not isinstance(value, tuple):
                raise frame.located(NotIterable(kind_of(value)), node)
            values += value
        else:
            values.append(frame.eval(node))
    return values


def _attribute(frame: Frame, node: ast.Attribute) -> Any:
    owner = frame.eval(node.value)
    frame.mark(node)
    return attribute_of(frame.e, owner, node.attr)


def _subscript(frame: Frame, node: ast.Subscript) -> Any:
    value = frame.eval(node.value)
    index = frame.eval(node.slice)
    frame.mark(node)
    if isinstance(value, Window):
        raise WindowIndex(kind_of(value))
    if isinstance(value, Tensor):
        return indexing.index_tile(frame.e, value, index)
    if holds_tensor(index):
        raise NotConstexpr("the index of a tuple", kind_of(index))
    return fold("indexing", operator.getitem, value, index)


def _slice(frame: Frame, node: ast.Slice) -> slice:
    bounds = (node.lower, node.upper, node.step)
    return slice(*(None if b is None else frame.eval(b) for b in bounds))


def _list_comp(frame: Frame, node: ast.ListComp) -> tuple[Any, ...]:
    """Over tuples and constant ranges only: unrolled."""
    results: list[Any] = []
    with frame.scope():
        _comprehend(frame, node, 0, results)
    return tuple(results)


def _comprehend(frame: Frame, node: ast.ListComp, depth: int, results: list[Any]) -> None:
    if depth == len(node.generators):
        results.append(frame.eval(node.elt))
        return
    generator = node.generators[depth]
    for item in static_items(frame.eval(generator.iter)):
        assign(frame, generator.target, item)
        kept = True
        for test in generator.ifs:
            value = frame.eval(test)
            if isinstance(value, Tensor):
                raise NotConstexpr("the condition of a comprehension", kind_of(value))
            kept = kept and bool(value)
        if kept:
            _comprehend(frame, node, depth + 1, results)


def _joined_str(frame: Frame, node: ast.JoinedStr) -> str:
    return "".join(str(frame.eval(part)) for part in node.values)


def _formatted(frame: Frame, node: ast.FormattedValue) -> str:
    value = frame.eval(node.value)
    if holds_tensor(value):
        raise NotConstexpr("a value in an f-string", kind_of(value))
    convert: dict[int, Callable[[Any], str]] = {114: repr, 115: str, 97: ascii}
    if node.conversion in convert:
        value = convert[node.conversion](value)
    spec = frame.eval(node.format_spec) if node.format_spec else ""
    return fold("formatting", format, value, spec)


RULES: dict[type, Callable[[Frame, Any], Any]] = {
    ast.Constant: _constant,
    ast.Name: _name,
    ast.BinOp: _bin_op,
    ast.UnaryOp: _unary_op,
    ast.Compare: _compare,
    ast.BoolOp: _bool_op,
    ast.IfExp: _if_exp,
    ast.Tuple: _tuple,
    ast.List: _tuple,
    ast.Attribute: _attribute,
    ast.Subscript: _subscript,
    ast.Slice: _slice,
    ast.ListComp: _list_comp,
    ast.JoinedStr: _joined_str,
    ast.FormattedValue: _formatted,
}
