"""Remarks: one sentence per choice a pass made, kept on the module as `mt.remarks`."""

from __future__ import annotations

from minitriton.ir.mlir import ir
from minitriton.passes.source_span import span_of

REMARKS = "mt.remarks"


def add_remark(module: ir.Module, op: ir.Operation, text: str) -> None:
    """Appends `text`, with the source line of `op` in front, to the module's list."""
    span = span_of(op.location)
    where = f"line {span.line}: " if span else ""
    attributes = module.operation.attributes
    known = list(ir.ArrayAttr(attributes[REMARKS])) if REMARKS in attributes else []
    attributes[REMARKS] = ir.ArrayAttr.get([*known, ir.StringAttr.get(where + text)])


def remarks_of(module: ir.Module) -> list[str]:
    """The remarks so far."""
    attributes = module.operation.attributes
    if REMARKS not in attributes:
        return []
    return [ir.StringAttr(text).value for text in ir.ArrayAttr(attributes[REMARKS])]
