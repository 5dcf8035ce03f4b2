"""Binding of names: plain, tuple and augmented assignment targets."""

from __future__ import annotations

import ast
from typing import Any

from minitriton.frontend.errors import ItemAssignment, StarTarget, Unpacking, kind_of
from minitriton.frontend.frame import Frame


def assign(frame: Frame, target: ast.expr, value: Any, node: ast.AST | None = None) -> None:
    """Binds `target` (a name, or nested tuples of names) to `value`; `node` is the statement."""
    match target:
        case ast.Name(id=name):
            frame.bind(name, value, node or target)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            if any(isinstance(part, ast.Starred) for part in parts):
                raise frame.located(StarTarget(), target)
            if not isinstance(value, tuple) or len(value) != len(parts):
                raise frame.located(Unpacking(len(parts), kind_of(value)), target)
            for part, item in zip(parts, value, strict=True):
                assign(frame, part, item, node)
        case ast.Starred():
            raise frame.located(StarTarget(), target)
        case _:
            raise frame.located(ItemAssignment(f"'{ast.unparse(target)}'"), target)
