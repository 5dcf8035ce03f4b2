"""`if`, conditional expressions, and the early exits that depend on them.

A condition known at compile time selects one side. A run-time condition becomes scf.if: both sides
are emitted into detached blocks first, and once their results are joined the op is made around
them. An `if` with a `return`, `break` or `continue` inside takes the rest of its statement list
into each side that goes on, so control flow stays structured.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

from minitriton.frontend import merging
from minitriton.frontend.arithmetic import to_bool
from minitriton.frontend.errors import (
    BadCondition,
    BlockCondition,
    BranchTypes,
    MaybeUndefined,
    ReturnInLoop,
    ReturnsDiffer,
    StaticJump,
    TernaryTypes,
)
from minitriton.frontend.frame import Flow, Frame, Jumped, Returned, Unusable
from minitriton.frontend.liveness import assigned, contains
from minitriton.frontend.values import Tensor
from minitriton.ir.mlir import ir

_JUMPS = (ast.Break, ast.Continue)
BROKEN = "break!"  # hidden name: whether a path left the loop
_ABSENT = object()


def require_condition(frame: Frame, value: Any, where: str) -> bool | Tensor:
    """A Python bool, or an int1 scalar; a mistake for tiles and pointers."""
    if isinstance(value, Tensor):
        if value.is_tile:
            raise BlockCondition(where, str(value.type))
        if value.dtype.is_ptr():
            raise BadCondition(where, f"a pointer ({value.type})")
        return to_bool(frame.e, value)
    return bool(value)


def _branch(
    frame: Frame, region: ir.Region, node: ast.AST, run: Callable[[], Any]
) -> tuple[ir.Block, Any]:
    """Runs `run` with operations going into a new block of `region`."""
    block, _ = frame.e.block(region, [])
    with frame.e.inside(block):
        result = run()
    return block, result


def emit_if(
    frame: Frame, node: ast.AST, condition: Tensor, sides: Sequence[Callable[[], Any]]
) -> tuple[ir.Operation, list[ir.Block], list[Any]]:
    """A temporary scf.if holding both sides, whose blocks still lack their yields."""
    holder, _ = frame.e.multi("scf.if", [], [condition], regions=2)
    blocks, results = [], []
    for region, run in zip(holder.regions, sides, strict=True):
        block, result = _branch(frame, region, node, run)
        blocks.append(block)
        results.append(result)
    frame.mark(node)
    return holder, blocks, results


def finish_if(
    frame: Frame,
    holder: ir.Operation,
    condition: Tensor,
    blocks: Sequence[ir.Block],
    values: Sequence[Any],
    form: Any,
) -> Any:
    """Replaces the temporary op: yields each side's `values` in the joined `form`."""
    for block, value in zip(blocks, values, strict=True):
        with frame.e.inside(block):
            frame.e.effect("scf.yield", list(merging.lower(frame.e, value, form)))
    types = list(merging.slots(form))
    op, results = frame.e.multi("scf.if", types, [condition], regions=2)
    for region, block in zip(op.regions, blocks, strict=True):
        block.append_to(region)
    holder.erase()
    return merging.fill(form, iter(results))


def dynamic_ternary(frame: Frame, node: ast.IfExp, condition: Tensor) -> Any:
    """`a if c else b` with a run-time condition: only the chosen side is executed."""
    sides = [lambda side=side: frame.eval(side) for side in (node.body, node.orelse)]
    holder, blocks, values = emit_if(frame, node, condition, sides)
    try:
        form = merging.join(*values)
    except merging.Mismatch:
        raise TernaryTypes(*map(merging.describe, values)) from None
    return finish_if(frame, holder, condition, blocks, values, form)


def if_flow(frame: Frame, node: ast.If, rest: Sequence[ast.stmt]) -> tuple[Flow, bool]:
    """Executes an `if`; the second result tells that `rest` was executed with it."""
    test = frame.eval(node.test)
    frame.mark(node.test)
    condition = require_condition(frame, test, "'if'")
    if not isinstance(condition, Tensor):
        chosen = node.body if condition else node.orelse
        if contains(chosen, (ast.Return, *_JUMPS)):
            # the exit may stand in a run-time `if`, whose other side goes on with the rest
            return frame.execute([*chosen, *rest]), True
        return frame.execute(chosen), False
    bodies = [*node.body, *node.orelse]
    if contains(bodies, (ast.Return,)):
        return _returning(frame, node, condition, rest), True
    if contains(bodies, _JUMPS):
        if frame.loop is None or frame.loop.live is None:
            word = "break" if contains(bodies, (ast.Break,)) else "continue"
            raise StaticJump(word)
        names = frame.loop.live | {BROKEN}
        changed = (assigned([*bodies, *rest]) & names) | {BROKEN}
        _merging(frame, node, condition, (*node.body, *rest), (*node.orelse, *rest), changed)
        return Jumped("continue"), True
    changed = assigned(bodies) & frame.live.after[id(node)]
    _merging(frame, node, condition, node.body, node.orelse, changed)
    return None, False


def _returning(frame: Frame, node: ast.If, condition: Tensor, rest: Sequence[ast.stmt]) -> Returned:
    """Both sides run to the end of the function; the op yields what they return."""
    if frame.loop is not None:
        raise ReturnInLoop()

    def side(body: Sequence[ast.stmt]) -> Any:
        with frame.scope():
            flow = frame.execute([*body, *rest])
        return flow.value if isinstance(flow, Returned) else None

    sides = [lambda: side(node.body), lambda: side(node.orelse)]
    holder, blocks, values = emit_if(frame, node, condition, sides)
    try:
        form = merging.join(*values)
    except merging.Mismatch:
        raise ReturnsDiffer(*map(merging.describe, values)) from None
    return Returned(finish_if(frame, holder, condition, blocks, values, form))


def _merging(
    frame: Frame,
    node: ast.If,
    condition: Tensor,
    body: Sequence[ast.stmt],
    orelse: Sequence[ast.stmt],
    changed: frozenset[str],
) -> None:
    """Both sides run in the current scope; live names that they assign are joined after it."""
    ends: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def side(statements: Sequence[ast.stmt]) -> None:
        with frame.scope():
            flow = frame.execute(statements)
            if flow == Jumped("break"):
                frame.names[BROKEN] = True
            ends.append((frame.names, frame.spans))

    holder, blocks, _ = emit_if(frame, node, condition, [lambda: side(body), lambda: side(orelse)])
    names = sorted(changed)
    joined: list[tuple[str, Any]] = []
    for name in names:
        form = _joined(name, ends[0], ends[1])
        if isinstance(form, Unusable):
            frame.names[name] = form
        elif form is not _ABSENT:
            joined.append((name, form))
    values = [tuple(end[0][name] for name, _ in joined) for end in ends]
    results = finish_if(frame, holder, condition, blocks, values, tuple(form for _, form in joined))
    for (name, _), value in zip(joined, results, strict=True):
        frame.bind(name, value, node)
        spans = [end[1].get(name) for end in ends]
        frame.spans[name] = next((s for s in spans if s is not None), frame.spans[name])


def _joined(name: str, left: tuple[Any, Any], right: tuple[Any, Any]) -> Any:
    a, b = left[0].get(name, _ABSENT), right[0].get(name, _ABSENT)
    spans = left[1].get(name), right[1].get(name)
    if a is _ABSENT and b is _ABSENT:
        return _ABSENT
    if isinstance(a, Unusable) or isinstance(b, Unusable):
        return a if isinstance(a, Unusable) else b
    if a is _ABSENT or b is _ABSENT:
        where = "in one branch of an 'if'"
        return Unusable(MaybeUndefined(name, where, spans[0] or spans[1]))
    if a is b and isinstance(a, Tensor):
        return _ABSENT  # neither side changed it
    try:
        return merging.join(a, b)
    except merging.Mismatch:
        return Unusable(
            BranchTypes(name, merging.describe(a), merging.describe(b), spans[0], spans[1])
        )
