"""What a user is told when a kernel cannot be compiled: facts in dataclasses, text made late.

`CompileError` is the only exception that a user's mistake raises while compiling. It prints the
source line with the offending range under carets, the call chain of inlined functions, and notes.
"""

from __future__ import annotations

import linecache
import unicodedata
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Span:
    """A range of source text; lines count from 1, columns from 0 (as in `ast`), end exclusive."""

    file: str
    line: int
    column: int
    end_line: int
    end_column: int


@dataclass(frozen=True)
class Note:
    """A second place or a remark that belongs to a diagnostic."""

    text: str
    span: Span | None = None


@dataclass(frozen=True)
class Diagnostic:
    """One error: what is wrong, where, how to mend it, and how the compiler got there."""

    title: str
    span: Span | None = None
    label: str = ""
    help: str = ""
    notes: tuple[Note, ...] = ()
    call_sites: tuple[tuple[str, Span], ...] = ()  # innermost first: (inlined function, call)


class MiniTritonError(Exception):
    """Base of every error that MiniTriton raises on purpose."""


class CompileError(MiniTritonError):
    """The kernel (or a request to compile it) is wrong; `diagnostic` has the facts."""

    def __init__(self, diagnostic: Diagnostic | str) -> None:
        if isinstance(diagnostic, str):
            diagnostic = Diagnostic(diagnostic)
        self.diagnostic = diagnostic
        super().__init__(diagnostic.title)

    def __str__(self) -> str:
        return render(self.diagnostic)


class SharedMemoryExceeded(CompileError):
    """The kernel needs more shared memory than a CTA of the target may have."""


class InternalError(MiniTritonError):
    """MiniTriton itself failed: names the stage; the user's kernel may well be right."""

    def __init__(self, stage: str, reason: str) -> None:
        self.stage, self.reason = stage, reason
        super().__init__(
            f"internal error in stage '{stage}': {reason}\n"
            "This is a bug in MiniTriton. Set MINITRITON_DUMP=DIR to keep the IR of every stage."
        )


def render(diagnostic: Diagnostic) -> str:
    """The whole message as plain text."""
    out = [f"error: {diagnostic.title}"]
    if diagnostic.span is not None:
        out += _excerpt(diagnostic.span, diagnostic.label)
    for name, span in diagnostic.call_sites:
        out.append(f"note: in the call of '{name}' here:")
        out += _excerpt(span, "")
    for note in diagnostic.notes:
        out.append(f"note: {note.text}")
        if note.span is not None:
            out += _excerpt(note.span, "")
    if diagnostic.help:
        out.append(f"help: {diagnostic.help}")
    return "\n".join(out)


def _width(text: str) -> int:
    """Terminal columns of `text`: wide characters take two, tabs were expanded before."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _excerpt(span: Span, label: str) -> list[str]:
    line = linecache.getline(span.file, span.line).rstrip("\n")
    head = f"  --> {span.file}:{span.line}:{span.column + 1}"
    if not line:
        return [head]
    # `ast` counts columns in UTF-8 bytes
    raw = line.encode()
    last = span.end_column if span.end_line == span.line else len(raw)
    before = raw[: span.column].decode(errors="ignore").expandtabs(4)
    marked = raw[span.column : last].decode(errors="ignore").expandtabs(4)
    gutter = len(str(span.line))
    carets = " " * _width(before) + "^" * max(_width(marked), 1)
    return [
        head,
        f"{'':{gutter}} |",
        f"{span.line} | {line.expandtabs(4)}",
        f"{'':{gutter}} | {carets}{' ' + label if label else ''}",
    ]


@dataclass
class CallStack:
    """Call sites of the functions being inlined, innermost last; owned by the frontend."""

    frames: list[tuple[str, Span]] = field(default_factory=list)

    def innermost_first(self) -> tuple[tuple[str, Span], ...]:
        return tuple(reversed(self.frames))
