"""One function being compiled: its names, places in the source, and the dispatch over its AST.

`Session` is the whole kernel; a `Frame` is one activation of a function in it (the kernel itself,
or a device function inlined at a call). The rules in `expressions`, `calls`, `statements`,
`branches` and `loops` are functions of (frame, node), looked up by node type.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from minitriton.frontend.emitter import Emitter
from minitriton.frontend.errors import Mistake, ReadBeforeAssignment
from minitriton.frontend.liveness import Liveness, analyse
from minitriton.frontend.source import SourceFunction
from minitriton.ir.diagnostics import CallStack, CompileError, Note, Span
from minitriton.ir.mlir import ir

ExpressionRule = Callable[["Frame", Any], Any]
SHOWN_CALLS = 6  # call sites listed in a message
StatementRule = Callable[["Frame", Any], None]


@dataclass(frozen=True)
class Unusable:
    """A name whose value differs between paths; the mistake is raised where it is read."""

    mistake: Mistake


@dataclass(frozen=True)
class Returned:
    """A statement list ended the function on every path, with this value."""

    value: Any


@dataclass(frozen=True)
class Jumped:
    """A statement list ended this iteration: `word` is "continue" or "break"."""

    word: str


Flow = Returned | Jumped | None  # None: control reaches the next statement


@dataclass
class Session:
    """What all frames of one kernel share."""

    emitter: Emitter
    expressions: Mapping[type, ExpressionRule]
    statements: Mapping[type, StatementRule]
    execute: Callable[[Frame, Sequence[ast.stmt]], Flow]
    resolve: Callable[[Frame, str], Any]  # a name that is not local
    calls: CallStack = field(default_factory=CallStack)
    liveness: dict[int, Liveness] = field(default_factory=dict)
    frames: list[Frame] = field(default_factory=list)  # active ones, innermost last


class Frame:
    """Scope and places of one function's activation."""

    def __init__(
        self, session: Session, source: SourceFunction, caller: ir.Location | None = None
    ) -> None:
        self.session = session
        self.e = session.emitter
        self.source = source
        self.caller = caller
        self.names: dict[str, Any] = {}
        self.spans: dict[str, Span] = {}  # where each name got its current value
        self.loop: LoopContext | None = None
        self.node: ast.AST = source.node
        self._locations: dict[ast.AST, ir.Location] = {}
        self._live = session.liveness.get(id(source))
        if self._live is None:
            self._live = session.liveness[id(source)] = analyse(source.node)

    @property
    def live(self) -> Liveness:
        """Liveness of this function."""
        assert self._live is not None
        return self._live

    def span(self, node: ast.AST) -> Span:
        """Source range of a node."""
        return self.source.span(node)

    def location(self, node: ast.AST) -> ir.Location:
        """MLIR location of a node, with the call sites this function was inlined through."""
        found = self._locations.get(node)
        if found is None:
            span = self.span(node)
            found = ir.Location.file(
                span.file, span.line, span.column + 1, span.end_line, span.end_column + 1
            )
            if self.caller is not None:
                found = ir.Location.callsite(found, [self.caller])
            self._locations[node] = found
        return found

    def mark(self, node: ast.AST) -> None:
        """New operations belong to `node`; called after its operands were evaluated."""
        self.node = node
        self.e.builder.loc = self.location(node)

    def eval(self, node: ast.expr) -> Any:
        """Value of an expression."""
        rule = self.session.expressions.get(type(node), unsupported)
        try:
            return rule(self, node)
        except Mistake as mistake:
            raise self.located(mistake, node) from None

    def execute(self, statements: Sequence[ast.stmt]) -> Flow:
        """Runs statements; tells how they ended."""
        return self.session.execute(self, statements)

    def located(self, mistake: Mistake, node: ast.AST) -> CompileError:
        """The user's error for `mistake` at `node`."""
        calls = self.session.calls.innermost_first()
        left_out = max(len(calls) - SHOWN_CALLS, 0)
        if left_out:
            calls = calls[: SHOWN_CALLS - 1] + calls[-1:]
        found = mistake.diagnostic(self.span(node), calls)
        if left_out:
            note = Note(f"{left_out} more calls between the last two are not shown")
            found = replace(found, notes=(note, *found.notes))
        return CompileError(found)

    def read(self, name: str) -> Any:
        """Value of a name; a mistake if it has none on some path."""
        if name in self.names:
            value = self.names[name]
            if isinstance(value, Unusable):
                raise value.mistake
            return value
        if name in self.source.local_names:
            raise ReadBeforeAssignment(name)
        return self.session.resolve(self, name)

    def bind(self, name: str, value: Any, node: ast.AST) -> None:
        """Gives a local name a value."""
        self.names[name] = value
        self.spans[name] = self.span(node)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Restores names afterwards: for a branch or a loop body."""
        saved = dict(self.names), dict(self.spans)
        try:
            yield
        finally:
            self.names, self.spans = saved


@dataclass(frozen=True)
class LoopContext:
    """The innermost loop: names to merge where paths of its body meet; None: unrolled."""

    live: frozenset[str] | None


def unsupported(frame: Frame, node: ast.AST) -> Any:
    """The rule for syntax without one."""
    from minitriton.frontend.syntax import refuse

    raise refuse(node)
