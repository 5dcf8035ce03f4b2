"""Kernels of 12 warps: three groups of four that run the same program, each with a third of its
rows (`split_rows`). What passes agree on, and how they say that a kernel cannot be one.
"""

from __future__ import annotations

from collections.abc import Sequence

from minitriton.ir.diagnostics import CompileError, Diagnostic, Note
from minitriton.ir.mlir import ir
from minitriton.ir.target import ROW_SPLIT_WARPS
from minitriton.ir.warp_roles import CONSUMER_REGISTERS, ROW_GROUPS
from minitriton.passes.source_span import span_of
from minitriton.passes.traversal import int_attribute

NUM_GROUPS = 3


def row_groups(module: ir.Module) -> int:
    """How many groups share the rows of the module's programs; 1 where none do."""
    return int_attribute(module.operation, ROW_GROUPS, 1)


def registers(module: ir.Module) -> int:
    """Of a thread that holds tiles, where a producer warp leaves it its own."""
    return CONSUMER_REGISTERS[max(2, row_groups(module))]


def refused(op: ir.Operation, reason: str, remarks: Sequence[str] = ()) -> CompileError:
    """That a kernel cannot run on 12 warps; op: why; remarks: of passes, on the way to that."""
    return CompileError(
        Diagnostic(
            f"num_warps={ROW_SPLIT_WARPS} is not possible: {reason}",
            span_of(op.location),
            "here",
            f"num_warps={ROW_SPLIT_WARPS} gives three warpgroups a third of the rows each, in "
            "kernels with a producer warp; use 4 or 8 for others",
            tuple(map(Note, remarks)),
        )
    )
