"""Noticing that a global or closure value which a compiled kernel has baked in was changed.

`watch` returns a check that is cheap enough for every launch: one identity comparison per captured
value, and none at all for kernels that capture nothing.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from minitriton.frontend.source import MISSING, SourceFunction, captured_text, source_of


def watch(source: SourceFunction) -> Callable[[], bool] | None:
    """A function that says whether all captured values are still what they are now, or None."""
    fixed: list[tuple[SourceFunction, str, Any]] = []
    mutable: list[tuple[SourceFunction, str, str]] = []
    pending, seen = [source], {id(source.fn)}
    while pending:
        function = pending.pop()
        for name, value in function.references():
            if _is_of_module(function, name):
                continue
            callee = source_of(value)
            if callee is not None and not callee.is_library and id(callee.fn) not in seen:
                seen.add(id(callee.fn))
                pending.append(callee)
            if isinstance(value, list | dict):
                mutable.append((function, name, str(captured_text(value))))
            elif callee is not None or captured_text(value) is not None:
                fixed.append((function, name, value))
    if not fixed and not mutable:
        return None
    return _check(fixed, mutable)


def _is_of_module(function: SourceFunction, name: str) -> bool:
    """Names such as `tl.float32` belong to another module, which is taken as constant."""
    root, dot, _ = name.partition(".")
    return bool(dot) and isinstance(function.outer(root), types.ModuleType)


def _check(
    fixed: list[tuple[SourceFunction, str, Any]], mutable: list[tuple[SourceFunction, str, str]]
) -> Callable[[], bool]:
    plain = [
        (function.fn.__globals__, name, value)
        for function, name, value in fixed
        if "." not in name and name not in function.fn.__code__.co_freevars
    ]
    others = [
        (function, name, value)
        for function, name, value in fixed
        if "." in name or name in function.fn.__code__.co_freevars
    ]

    def unchanged() -> bool:
        for namespace, name, value in plain:
            if namespace.get(name) is not value:
                return False
        for function, name, value in others:
            if _value(function, name) is not value:
                return False
        for function, name, text in mutable:
            if str(captured_text(_value(function, name))) != text:
                return False
        return True

    return unchanged


def _value(function: SourceFunction, name: str) -> Any:
    root, *attributes = name.split(".")
    value = function.outer(root)
    for attribute in attributes:
        value = getattr(value, attribute, MISSING)
    return value
