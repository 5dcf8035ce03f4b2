"""Rules for statements, and the execution of statement lists."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from minitriton.frontend.assignments import assign
from minitriton.frontend.branches import if_flow
from minitriton.frontend.errors import (
    Mistake,
    NotConstexpr,
    ReturnInLoop,
    UnsupportedSyntax,
    kind_of,
)
from minitriton.frontend.expressions import binary
from minitriton.frontend.frame import Flow, Frame, Jumped, Returned, unsupported
from minitriton.frontend.lang_debug import device_assert, static_assert
from minitriton.frontend.loops import for_loop, while_loop
from minitriton.frontend.source import is_constexpr_annotation
from minitriton.frontend.values import Tensor, holds_tensor


def execute(frame: Frame, statements: Sequence[ast.stmt]) -> Flow:
    """Runs `statements` in order; an `if` with an exit inside takes over what follows it."""
    for position, node in enumerate(statements):
        try:
            if isinstance(node, ast.If):
                flow, took_rest = if_flow(frame, node, statements[position + 1 :])
                if took_rest:
                    return flow
            else:
                flow = frame.session.statements.get(type(node), unsupported)(frame, node)
        except Mistake as mistake:
            raise frame.located(mistake, node) from None
        if flow is not None:
            return flow
    return None


def _assign(frame: Frame, node: ast.Assign) -> None:
    value = frame.eval(node.value)
    for target in node.targets:
        assign(frame, target, value, node)


def _aug_assign(frame: Frame, node: ast.AugAssign) -> None:
    if not isinstance(node.target, ast.Name):
        assign(frame, node.target, None)  # refuses it
    left = frame.read(node.target.id)  # type: ignore[union-attr]  # assign refused the rest
    right = frame.eval(node.value)
    frame.mark(node)
    assign(frame, node.target, binary(frame, type(node.op), left, right), node)


def _ann_assign(frame: Frame, node: ast.AnnAssign) -> None:
    if node.value is None:
        raise UnsupportedSyntax("an annotation without a value", "assign a value")
    value = frame.eval(node.value)
    annotation = ast.unparse(node.annotation)
    if is_constexpr_annotation(annotation) and holds_tensor(value):
        name = ast.unparse(node.target)
        raise frame.located(NotConstexpr(f"'{name}: {annotation}'", kind_of(value)), node.value)
    assign(frame, node.target, value, node)


def _expression(frame: Frame, node: ast.Expr) -> None:
    if not isinstance(node.value, ast.Constant):  # docstrings
        frame.eval(node.value)


def _return(frame: Frame, node: ast.Return) -> Returned:
    if frame.loop is not None and frame.loop.live is not None:
        raise ReturnInLoop()
    return Returned(None if node.value is None else frame.eval(node.value))


def _assert(frame: Frame, node: ast.Assert) -> None:
    condition = frame.eval(node.test)
    message = "" if node.msg is None else frame.eval(node.msg)
    frame.mark(node)
    if isinstance(condition, Tensor):
        device_assert(condition, message)
    else:
        static_assert(condition, message)


def _nothing(frame: Frame, node: ast.AST) -> None:
    """`pass`."""


RULES: dict[type, Any] = {
    ast.Assign: _assign,
    ast.AugAssign: _aug_assign,
    ast.AnnAssign: _ann_assign,
    ast.Expr: _expression,
    ast.Return: _return,
    ast.Assert: _assert,
    ast.Pass: _nothing,
    ast.For: for_loop,
    ast.While: while_loop,
    ast.Break: lambda frame, node: Jumped("break"),
    ast.Continue: lambda frame, node: Jumped("continue"),
}
