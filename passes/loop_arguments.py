"""Loops that get further iter args."""

from __future__ import annotations

from collections.abc import Sequence

from minitriton.ir.builder import Builder
from minitriton.ir.mlir import ir
from minitriton.passes.traversal import Value, attributes_of, terminator_of


def with_arguments(loop: ir.Operation, starts: Sequence[Value]) -> tuple[ir.Operation, list[Value]]:
    """A scf.for before `loop` with its body, and further iter args that begin with `starts`: that,
    and those. Its terminator yet has to yield them; `loop` is empty, its results are in use."""
    builder = Builder(ir.InsertionPoint(loop), loop.location)
    types = [value.type for value in (*loop.results, *starts)]
    new = builder.create("scf.for", types, [*loop.operands, *starts], attributes_of(loop), 1)
    body = loop.regions[0].blocks[0]
    body.append_to(new.regions[0])
    return new, [body.add_argument(value.type, loop.location) for value in starts]


def yield_also(loop: ir.Operation, values: Sequence[Value]) -> None:
    """The body of `loop` yields `values` for its further iter args."""
    end = terminator_of(loop.regions[0].blocks[0])
    builder = Builder(ir.InsertionPoint(end), loop.location)
    builder.create("scf.yield", [], [*end.operands, *values])
    end.erase()


def give_results(loop: ir.Operation, new: ir.Operation) -> None:
    """The results of `new` take the place of those of `loop`, which are as many or fewer."""
    for index, result in enumerate(loop.results):
        result.replace_all_uses_with(new.results[index])
