"""The MLIR context of this process, with the `mt` dialect loaded once.

Threading is off: Python verifiers on MLIR's worker threads would deadlock on the GIL. A context
costs about 10 ms, so there is one; `with use():` enters it around a compilation.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager

from minitriton.ir import (
    ops_compute,
    ops_elementwise,
    ops_indexed,
    ops_memory,
    ops_program,
    ops_shape,
)
from minitriton.ir.dialect import MT, NoEffects
from minitriton.ir.mlir import dialect_search_prefix, ir

FAMILIES = (ops_program, ops_shape, ops_compute, ops_elementwise, ops_indexed, ops_memory)
# Re-entrant: a kernel that is compiled while another is being built (constexpr_function) nests.
_compile_lock = threading.RLock()


@functools.cache
def context() -> ir.Context:
    """The process-wide context."""
    # Without an importable module of this name the bindings retry the import on every access.
    sys.modules.setdefault(dialect_search_prefix() + ".mt", types.ModuleType("mt"))
    created = ir.Context()
    created.enable_multithreading(False)
    with created, ir.Location.unknown():
        MT.load()
        for family in FAMILIES:
            for op in family.PURE:
                NoEffects.attach(op.OPERATION_NAME)
    return created


@contextmanager
def use() -> Iterator[ir.Context]:
    """Enters the context for a `with` block; one thread compiles at a time."""
    with _compile_lock, context() as entered, ir.Location.unknown():
        yield entered


@functools.cache
def _pure_names() -> frozenset[str]:
    return frozenset(op.OPERATION_NAME for family in FAMILIES for op in family.PURE)


def first_effect(operation: ir.Operation) -> str | None:
    """Name without "mt." of an op inside `operation` that has effects; None if none has."""
    for region in operation.regions:
        for block in region.blocks:
            for view in block.operations:
                op = view.operation
                own = op.name.startswith("mt.") and op.name not in _pure_names() | {"mt.yield"}
                found = op.name.removeprefix("mt.") if own else first_effect(op)
                if found is not None:
                    return found
    return None


@functools.cache
def op_names() -> frozenset[str]:
    """Full names of all `mt` ops."""
    return frozenset(op.OPERATION_NAME for family in FAMILIES for op in family.OPS)
