"""The kernel's line to blame where the assembler refuses inline PTX of its author."""

from __future__ import annotations

import linecache
import re

from minitriton.ir.asm_operands import MARK
from minitriton.ir.diagnostics import CompileError, Diagnostic, Note, Span
from minitriton.runtime.assembler import AssemblerError

_LOC = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)\s+(\d+)")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.M)
_END = "// end inline asm"


def explained(error: AssemblerError, ptx: str) -> CompileError | None:
    """The error as one of the kernel; None unless the line it names is in such a text."""
    lines = ptx.splitlines()
    if error.line is None or not 0 < error.line <= len(lines):
        return None
    start = error.line - 1
    before = [number for number in range(start) if lines[number].strip()]
    if before and lines[before[-1]].strip() == _END:  # where a missing semicolon is noticed
        start = before[-1] - 1
    while start and MARK not in lines[start] and lines[start].strip() != _END:
        start -= 1
    if MARK not in lines[start]:
        return None
    reason = str(error).split("\n")[0].split(": ", 1)[-1]
    note = Note(f"line {error.line} of the PTX: {lines[error.line - 1].strip()}")
    return CompileError(
        Diagnostic(
            f"the assembler refuses this inline PTX: {reason}",
            _span(lines, start, dict(_FILE.findall(ptx))),
            notes=(note,),
        )
    )


def _span(lines: list[str], start: int, files: dict[str, str]) -> Span | None:
    """The source that the line table has for the PTX at `start`, to the end of its line."""
    for line in reversed(lines[:start]):
        if found := _LOC.match(line):
            file, row, column = files.get(found[1], ""), int(found[2]), max(int(found[3]) - 1, 0)
            text = linecache.getline(file, row).rstrip("\n")
            return Span(file, row, column, row, len(text.encode()))
    return None
