"""A function's source as the compiler reads it: AST with true positions, parameters, outer names.

`SourceFunction` is made once per function and parsed on first use. `dependency_key()` is the part
of the cache key that stands for the text of the kernel and of everything it reaches.
"""

from __future__ import annotations

import ast
import builtins
import enum
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from minitriton.frontend.errors import BadParameters, Mistake, NoSource
from minitriton.frontend.signature import value_text
from minitriton.frontend.values import constexpr, unwrap
from minitriton.ir.diagnostics import CompileError, Span

LANGUAGE_VERSION = "1"  # part of every key: raise it when the meaning of kernel source changes
MISSING = object()
EMPTY = inspect.Parameter.empty


@dataclass(frozen=True)
class Parameter:
    """One parameter: `default` is `EMPTY` if it has none; `variadic` for `*args`."""

    name: str
    constexpr: bool
    annotation: Any
    default: Any
    variadic: bool = False


class SourceFunction:
    """A Python function that is compiled instead of run."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.name = fn.__name__
        self.module = getattr(fn, "__module__", "") or ""
        code = fn.__code__
        self.file = code.co_filename
        self.first_line = code.co_firstlineno

    def __repr__(self) -> str:
        return f"<function {self.name} at {self.file}:{self.first_line}>"

    @property
    def is_library(self) -> bool:
        """Whether it belongs to the language itself, whose version covers its text."""
        return self.module.startswith("minitriton.language")

    @functools.cached_property
    def node(self) -> ast.FunctionDef:
        """The definition, decorators stripped, with positions of the file."""
        try:
            lines, first = inspect.getsourcelines(self.fn)
        except (OSError, TypeError) as error:
            raise self.refuse(NoSource(self.name, str(error))) from None
        text = "".join(lines)
        # An enclosing `if` keeps the columns of an indented definition.
        indented = text[:1].isspace()
        try:
            tree = ast.parse("if 1:\n" + text if indented else text)
        except SyntaxError as error:
            raise self.refuse(NoSource(self.name, f"it does not parse ({error.msg})")) from None
        found = (
            tree.body[0].body[0]
            if indented and isinstance(tree.body[0], ast.If)
            else (tree.body[0])
        )
        if not isinstance(found, ast.FunctionDef):
            raise self.refuse(NoSource(self.name, "it is not a 'def' statement"))
        ast.increment_lineno(found, max(first, 1) - 1 - indented)
        found.decorator_list = []
        return found

    def span(self, node: ast.AST) -> Span:
        """Where `node` stands in the file."""
        at: Any = node  # only nodes that have a place are asked for it
        return Span(self.file, at.lineno, at.col_offset, at.end_lineno, at.end_col_offset)

    def refuse(self, mistake: Mistake, node: ast.AST | None = None) -> CompileError:
        """The compile error for a mistake in the definition itself."""
        at = self.span(node) if node is not None else None
        return CompileError(mistake.diagnostic(at, ()))

    @functools.cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters in order; CompileError for `**kwargs`."""
        found = []
        for parameter in inspect.signature(self.fn).parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                raise self.refuse(BadParameters(f"'**{parameter.name}'"), self.node.args.kwarg)
            found.append(
                Parameter(
                    parameter.name,
                    is_constexpr_annotation(parameter.annotation),
                    parameter.annotation,
                    unwrap(parameter.default),
                    parameter.kind is parameter.VAR_POSITIONAL,
                )
            )
        return tuple(found)

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """Python's signature, for binding calls."""
        return inspect.signature(self.fn)

    @functools.cached_property
    def local_names(self) -> frozenset[str]:
        """Parameters and names that the body assigns."""
        names = {p.name for p in self.parameters}
        names |= {
            n.id
            for n in ast.walk(self.node)
            if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)
        }
        return frozenset(names)

    def outer(self, name: str) -> Any:
        """Value of a closure variable, a module global or a Python builtin now, or MISSING."""
        code = self.fn.__code__
        if name in code.co_freevars and self.fn.__closure__:
            try:
                return self.fn.__closure__[code.co_freevars.index(name)].cell_contents
            except ValueError:  # the variable is not assigned yet
                return MISSING
        found = self.fn.__globals__.get(name, MISSING)
        return getattr(builtins, name, MISSING) if found is MISSING else found

    def outer_names(self) -> list[str]:
        """Names that a kernel could mean by a misspelt one."""
        return [*self.fn.__code__.co_freevars, *self.fn.__globals__]

    def annotated_constexpr(self, name: str) -> bool:
        """Whether the module declares `name: tl.constexpr = ...`."""
        annotations = self.fn.__globals__.get("__annotations__", {})
        return is_constexpr_annotation(annotations.get(name, EMPTY))

    @functools.cached_property
    def text_hash(self) -> str:
        """Hash of file and syntax tree with its positions; only comments do not matter.

        Positions count because the code carries them for errors, asserts and profilers.
        """
        return _digest(f"{self.file}\n{ast.dump(self.node, include_attributes=True)}")

    @functools.cached_property
    def outer_paths(self) -> tuple[tuple[str, ...], ...]:
        """The names that the body does not bind, alone and with the attributes read of them, in
        order of appearance: `a.b` as ("a", "b")."""
        paths = (self._path(node) for node in ast.walk(self.node))
        return tuple(dict.fromkeys(path for path in paths if path))

    def _path(self, node: ast.AST) -> tuple[str, ...]:
        if isinstance(node, ast.Name):
            return () if node.id in self.local_names else (node.id,)
        if isinstance(node, ast.Attribute):
            owner = self._path(node.value)
            return (*owner, node.attr) if owner else ()
        return ()

    def references(self) -> Iterator[tuple[str, Any]]:
        """Outer values that the body names, as (dotted name, value), in order of appearance."""
        for root, *attributes in self.outer_paths:
            value = self.outer(root)
            for attribute in attributes:
                is_scope = isinstance(value, types.ModuleType | type)
                value = getattr(value, attribute, MISSING) if is_scope else MISSING
            if value is not MISSING:
                yield ".".join((root, *attributes)), value

    def captured(self) -> tuple[tuple[str, str], ...]:
        """Compile-time values reached by this function and its callees, as (name, text)."""
        return tuple(sorted(item for part in self._closure() for item in part[1]))

    def _closure(self) -> Iterator[tuple[SourceFunction, tuple[tuple[str, str], ...]]]:
        """This function and each device function it reaches, with the values they capture."""
        pending, seen = [self], {id(self.fn)}
        while pending:
            function = pending.pop()
            values = []
            for name, value in function.references():
                callee = source_of(value)
                if callee is not None:
                    if id(callee.fn) not in seen and not callee.is_library:
                        seen.add(id(callee.fn))
                        pending.append(callee)
                else:
                    text = captured_text(value)
                    if text is not None:
                        values.append((f"{function.name}.{name}", text))
            yield function, tuple(values)

    def dependency_key(self) -> str:
        """Hash of all source text and compile-time values that the compiled code depends on."""
        parts = sorted(
            f"{function.name}:{function.text_hash}:{values}" for function, values in self._closure()
        )
        text = "\n".join([LANGUAGE_VERSION, self.name, *parts])
        return _digest(text)


class DeviceFunction:
    """A function of the language's own library, written in the language; inlined where called."""

    __name__: str

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.__mt_fn__ = fn
        functools.update_wrapper(self, fn)

    @functools.cached_property
    def __minitriton_source__(self) -> SourceFunction:
        return SourceFunction(self.__mt_fn__)

    def cache_text(self) -> str:
        """Stands for this function in keys."""
        source = self.__minitriton_source__
        return f"{source.name} {source.dependency_key()}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{self.__name__} is a device function: call it inside a kernel")


class ConstexprFunction:
    """A plain Python function that kernels call at compile time with constant arguments."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        functools.update_wrapper(self, fn)

    def cache_text(self) -> str:
        """Stands for this function in keys."""
        return f"{self.fn.__name__} {SourceFunction(self.fn).dependency_key()}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args = tuple(unwrap(a) for a in args)
        return self.fn(*args, **{name: unwrap(value) for name, value in kwargs.items()})


def _digest(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()


constexpr_function = ConstexprFunction


def source_of(value: Any) -> SourceFunction | None:
    """The source behind a jit or device function, None for anything else."""
    return None if isinstance(value, type) else getattr(value, "__minitriton_source__", None)


def is_constexpr_annotation(annotation: Any) -> bool:
    """Whether an annotation means tl.constexpr (also as text under postponed evaluation)."""
    if isinstance(annotation, str):
        return annotation.strip("'\" ").split(".")[-1] == "constexpr"
    return annotation is constexpr


def captured_text(value: Any) -> str | None:
    """Key text of a captured compile-time value; None for what has no value of its own."""
    if isinstance(value, enum.EnumMeta):
        members: dict[str, Any] = dict(value.__members__)
        return ", ".join(f"{name}={member.value!r}" for name, member in members.items())
    if isinstance(value, types.ModuleType | types.BuiltinFunctionType | type):
        return None
    if getattr(value, "__mt_builtin__", False) or isinstance(value, types.FunctionType):
        return None
    try:
        return value_text(unwrap(value))
    except TypeError:
        return None
