"""From an op's location to the range of source text that a diagnostic shows."""

from __future__ import annotations

from minitriton.ir.diagnostics import Span
from minitriton.ir.mlir import ir


def span_of(location: ir.Location) -> Span | None:
    """The innermost source range of a location; None where it has none."""
    if isinstance(location, ir.CallSiteLoc):
        return span_of(location.callee)
    if isinstance(location, ir.NameLoc):
        return span_of(location.child_loc)
    if isinstance(location, ir.FusedLoc):
        return next((s for s in map(span_of, location.locations) if s is not None), None)
    if not isinstance(location, ir.FileLineColLoc):
        return None
    # MLIR counts columns from 1 (0: unknown), diagnostics from 0
    start, end = max(0, location.start_col - 1), max(0, location.end_col - 1)
    return Span(location.filename, location.start_line, start, location.end_line, end)
