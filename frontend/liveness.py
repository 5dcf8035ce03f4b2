"""Which names are still needed after each `if` and loop: classic backward liveness on the AST.

Control flow only has to merge live names: a temporary that differs between branches is no error,
and a loop carries nothing that its body always assigns anew.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field

Names = frozenset[str]


@dataclass
class Liveness:
    """Results by `id` of the statement: live `after` it and, for loops, at the `head`."""

    after: dict[int, Names] = field(default_factory=dict)
    head: dict[int, Names] = field(default_factory=dict)


def analyse(function: ast.FunctionDef) -> Liveness:
    """Liveness of every compound statement of `function`."""
    result = Liveness()
    _Analysis(result).block(function.body, frozenset(), ())
    return result


def assigned(statements: Iterable[ast.stmt]) -> Names:
    """Names that any of the statements may bind, nested ones included."""
    return frozenset(
        node.id
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    )


def contains(statements: Iterable[ast.stmt], kinds: tuple[type[ast.stmt], ...]) -> bool:
    """Whether such a statement occurs; break and continue of inner loops do not count."""
    jumps = all(issubclass(kind, ast.Break | ast.Continue) for kind in kinds)
    for statement in statements:
        if isinstance(statement, kinds):
            return True
        if isinstance(statement, ast.If):
            if contains([*statement.body, *statement.orelse], kinds):
                return True
        elif (
            isinstance(statement, ast.For | ast.While)
            and not jumps
            and contains(statement.body, kinds)
        ):
            return True
    return False


def _loads(*nodes: ast.AST | None) -> Names:
    return frozenset(
        child.id
        for node in nodes
        if node is not None
        for child in ast.walk(node)
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Load)
    )


class _Analysis:
    def __init__(self, result: Liveness) -> None:
        self.result = result

    def block(self, statements: list[ast.stmt], out: Names, loop: tuple[Names, ...]) -> Names:
        """Names live before `statements`; `loop` is (live at `continue`, live at `break`)."""
        for statement in reversed(statements):
            out = self.statement(statement, out, loop)
        return out

    def statement(self, node: ast.stmt, out: Names, loop: tuple[Names, ...]) -> Names:
        match node:
            case ast.Assign(targets=targets, value=value):
                return (out - _stores(targets)) | _loads(value, *targets)
            case ast.AnnAssign(target=target, value=value):
                return (out - _stores([target])) | _loads(value)
            case ast.AugAssign(target=target, value=value):
                return out | _stores([target]) | _loads(value)
            case ast.If(test=test, body=body, orelse=orelse):
                self.result.after[id(node)] = out
                return self.block(body, out, loop) | self.block(orelse, out, loop) | _loads(test)
            case ast.For() | ast.While():
                return self.loop(node, out)
            case ast.Return(value=value):
                return _loads(value)
            case ast.Continue() if loop:
                return loop[0]
            case ast.Break() if loop:
                return loop[1]
        return out | _loads(node)

    def loop(self, node: ast.For | ast.While, out: Names) -> Names:
        self.result.after[id(node)] = out
        if isinstance(node, ast.While):
            target, test, outside = frozenset[str](), _loads(node.test), frozenset[str]()
        else:
            target, test, outside = _stores([node.target]), frozenset(), _loads(node.iter)
        head = out | test
        while True:
            grown = head | (self.block(node.body, head, (head, out)) - target) | test
            if grown == head:
                break
            head = grown
        self.result.head[id(node)] = head
        return head | outside


def _stores(targets: Iterable[ast.AST]) -> Names:
    return frozenset(
        child.id
        for target in targets
        for child in ast.walk(target)
        if isinstance(child, ast.Name) and not isinstance(child.ctx, ast.Load)
    )
