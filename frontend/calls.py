"""Rule for calls: functions of the language, inlined device functions, compile-time functions."""

from __future__ import annotations

import ast
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from minitriton.frontend.casting import cast, to_tensor
from minitriton.frontend.errors import (
    ConstexprFailed,
    Mistake,
    NotCallable,
    NotDeviceFunction,
    RuntimeArgument,
    TooDeep,
    UnsupportedSyntax,
    WrongArguments,
    kind_of,
)
from minitriton.frontend.expressions import elements, fold
from minitriton.frontend.frame import Frame, Returned
from minitriton.frontend.methods import BoundMethod
from minitriton.frontend.python_builtins import REPLACEMENTS
from minitriton.frontend.source import ConstexprFunction, SourceFunction, source_of
from minitriton.frontend.values import constexpr, tensors_in, unwrap
from minitriton.ir import dtypes

DEEPEST = 100  # inlined levels: beyond it recursion is taken for endless


def call(frame: Frame, node: ast.Call) -> Any:
    """Rule for `f(...)`."""
    fn = frame.eval(node.func)
    args = elements(frame, node.args)
    kwargs: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            mistake = UnsupportedSyntax("'**' in a call", "write the keywords one by one")
            raise frame.located(mistake, keyword.value)
        kwargs[keyword.arg] = frame.eval(keyword.value)
    frame.mark(node)
    try:
        return apply(frame, fn, args, kwargs, node)
    except Mistake as mistake:
        at = _argument_node(fn, node, mistake.argument)
        raise frame.located(mistake, at) from None


def apply(frame: Frame, fn: Any, args: list[Any], kwargs: dict[str, Any], node: ast.AST) -> Any:
    """Calls `fn`, whatever it is, with values of the kernel."""
    if isinstance(fn, BoundMethod):
        return apply(frame, fn.function, [fn.owner, *args], kwargs, node)
    source = source_of(fn)
    if source is not None:
        return inline(frame, source, args, kwargs, node)
    fn = REPLACEMENTS.get(fn, fn) if _hashable(fn) else fn
    if getattr(fn, "__mt_builtin__", False):
        return _call_builtin(fn, args, kwargs)
    if isinstance(fn, dtypes.dtype) and len(args) == 1:
        return cast(frame.e, to_tensor(frame.e, args[0]), fn)
    if fn is constexpr:
        _require_constants("tl.constexpr", args, kwargs)
        return unwrap(args[0]) if args else None
    if hasattr(fn, "_fields") or (isinstance(fn, type) and issubclass(fn, tuple)):
        return fold(fn.__name__, fn, *args) if not kwargs else fn(*args, **kwargs)
    return _call_python(fn, args, kwargs)


def _hashable(fn: Any) -> bool:
    return isinstance(fn, type | types.FunctionType | types.BuiltinFunctionType)


def _call_python(fn: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Compile-time calls: constexpr functions, methods of constants, types of dtypes."""
    name = getattr(fn, "__name__", type(fn).__name__)
    owner = getattr(fn, "__self__", None)
    constant_method = owner is not None and isinstance(
        owner, str | int | float | tuple | dtypes.dtype | dtypes.pointer_type | dtypes.block_type
    )
    if isinstance(fn, ConstexprFunction):
        _require_constants(name, args, kwargs)
        try:
            return unwrap(fn(*args, **kwargs))
        except Exception as error:  # the user's own function may raise anything
            raise ConstexprFailed(f"'{name}'", f"{type(error).__name__}: {error}") from None
    if getattr(fn, "__mt_constexpr__", False):
        _require_constants(name, args, kwargs)
        return fold(f"'{name}'", functools.partial(fn, **kwargs), *args)
    if constant_method or fn in (dtypes.pointer_type, dtypes.block_type):
        _require_constants(name, args, kwargs)
        return fold(f"'{name}'", functools.partial(fn, **kwargs), *args)
    if isinstance(fn, types.FunctionType | types.BuiltinFunctionType | type):
        raise NotDeviceFunction(name)
    raise NotCallable(kind_of(fn))


def _require_constants(name: str, args: list[Any], kwargs: dict[str, Any]) -> None:
    for tensor in tensors_in((*args, *kwargs.values())):
        raise RuntimeArgument(name, kind_of(tensor))


def _call_builtin(fn: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    try:
        return fn(*args, **kwargs)
    except TypeError:
        _check_binding(fn.__name__, inspect.signature(fn), args, kwargs)
        raise


def _check_binding(
    name: str, signature: inspect.Signature, args: list[Any], kwargs: dict[str, Any]
) -> inspect.BoundArguments:
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        plain = signature.replace(
            parameters=[p.replace(annotation=p.empty) for p in signature.parameters.values()],
            return_annotation=inspect.Signature.empty,
        )
        raise WrongArguments(name, str(error), str(plain)) from None


def inline(
    frame: Frame, source: SourceFunction, args: list[Any], kwargs: dict[str, Any], node: ast.AST
) -> Any:
    """Executes the body of a device function in place; returns what it returns."""
    session = frame.session
    stack = session.calls.frames
    if len(stack) >= DEEPEST:
        raise TooDeep(source.name, DEEPEST)
    bound = _check_binding(source.name, source.signature, args, kwargs)
    bound.apply_defaults()
    caller = frame.location(node)
    stack.append((source.name, frame.span(node)))
    try:
        inner = Frame(session, source, caller)
        for parameter in source.parameters:
            value = unwrap(bound.arguments[parameter.name])
            inner.names[parameter.name] = tuple(value) if parameter.variadic else value
        session.frames.append(inner)
        flow = inner.execute(source.node.body)
    finally:
        del session.frames[session.frames.index(frame) + 1 :]
        stack.pop()
    frame.mark(node)
    return flow.value if isinstance(flow, Returned) else None


def _argument_node(fn: Any, node: ast.Call, argument: str | None) -> ast.AST:
    """The expression passed for parameter `argument`, or the whole call."""
    if argument is None:
        return node
    for keyword in node.keywords:
        if keyword.arg == argument:
            return keyword.value
    bound = isinstance(fn, BoundMethod)
    target = fn.function if bound else fn
    try:
        names = list(inspect.signature(target).parameters)[1 if bound else 0 :]
    except (TypeError, ValueError):
        return node
    position = names.index(argument) if argument in names else len(node.args)
    return node.args[position] if position < len(node.args) else node


RULES: dict[type, Callable[[Frame, Any], Any]] = {ast.Call: call}
