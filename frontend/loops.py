"""`for` and `while`: scf.for, scf.while (also a `for` with `break`), or unrolled copies.

A name is carried from one iteration to the next if the body assigns it and it is live at the loop's
head or after the loop. A carried constant stays one as long as the body leaves it alone: the body
is built with it first, and again with a run-time value in its place if it turned out to change.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minitriton.frontend import arithmetic, merging, ranges
from minitriton.frontend.assignments import assign
from minitriton.frontend.branches import BROKEN, emit_if, finish_if, require_condition
from minitriton.frontend.casting import cast, scalar
from minitriton.frontend.errors import (
    EndlessLoop,
    LoopTypeChange,
    MaybeUndefined,
    UnsupportedSyntax,
)
from minitriton.frontend.frame import Flow, Frame, Jumped, LoopContext, Returned, Unusable
from minitriton.frontend.liveness import assigned, contains
from minitriton.frontend.promotion import integer_promote, literal_type
from minitriton.frontend.values import Tensor
from minitriton.ir import dtypes
from minitriton.ir.mlir import ir

_INDEX = "index!"  # hidden name: the induction variable of a `for` that became scf.while


@dataclass
class Attempt:
    """One construction of the loop: its op, where yields go, and the names after one iteration."""

    op: ir.Operation
    results: list[Tensor]
    body: ir.Block
    names: dict[str, Any]
    spans: dict[str, Any]


# Builds the op for initial values and a function that binds the block arguments to names.
Construct = Callable[[list[Tensor], Callable[[Sequence[Tensor]], None]], Attempt | None]


def for_loop(frame: Frame, node: ast.For) -> Flow:
    """Rule for `for`."""
    if node.orelse:
        raise frame.located(UnsupportedSyntax("'else' on a loop", "test a flag after it"), node)
    iterable = frame.eval(node.iter)
    frame.mark(node.iter)
    if not isinstance(iterable, ranges.range) or iterable.static:
        return _unrolled(frame, node, iterable)
    hidden = tuple(n.id for n in ast.walk(node.target) if isinstance(n, ast.Name))
    if contains(node.body, (ast.Break,)):
        _breakable_for(frame, node, iterable, hidden)
    else:
        _plain_for(frame, node, iterable, hidden)
    for name in hidden:
        where = "as the variable of a loop that has ended"
        frame.names[name] = Unusable(MaybeUndefined(name, where, frame.span(node.target)))
    return None


def _unrolled(frame: Frame, node: ast.For, iterable: Any) -> Flow:
    outer, frame.loop = frame.loop, LoopContext(None)
    try:
        for item in ranges.static_items(iterable):
            assign(frame, node.target, item)
            flow = frame.execute(node.body)
            if isinstance(flow, Returned):
                return flow
            if flow == Jumped("break"):
                break
    finally:
        frame.loop = outer
    return None


def _bounds(frame: Frame, loop: ranges.range) -> tuple[list[Tensor], dtypes.dtype, bool]:
    """Start, end and step in the loop's own type (i32 or i64); the variable's type; reversed?"""
    e = frame.e
    start, stop, step = loop.bounds
    backwards = not isinstance(step, Tensor) and step < 0
    parts = [start, stop, -step if backwards else step]
    kinds = [x.dtype if isinstance(x, Tensor) else literal_type(x) for x in parts]
    kinds = [dtypes.int32 if k.is_bool() else k for k in kinds]
    variable = integer_promote(integer_promote(kinds[0], kinds[1]), kinds[2])
    narrow = variable.bits < 32 or variable == dtypes.int32
    own = dtypes.int32 if narrow else dtypes.int64
    first, last, by = (scalar(e, x, own) for x in parts)
    return ([last, first, by] if backwards else [first, last, by]), variable, backwards


def _variable(
    frame: Frame, index: Tensor, bounds: Sequence[Tensor], type_: Any, backwards: bool
) -> Tensor:
    """The user's loop variable: counting down mirrors the index."""
    e = frame.e
    if backwards:
        low, high, _ = bounds
        index = arithmetic.add(e, arithmetic.sub(e, low, index), high)
    return cast(e, index, type_)


def _plain_for(frame: Frame, node: ast.For, loop: ranges.range, hidden: tuple[str, ...]) -> None:
    e = frame.e
    bounds, variable, backwards = _bounds(frame, loop)
    attributes = {f"mt.{name}": e.i32(value) for name, value in loop.options.items()}
    attributes |= {f"mt.{flag}": e.unit() for flag in loop.flags}

    def construct(inits: list[Tensor], bind: Callable[[Sequence[Tensor]], None]) -> Attempt:
        frame.mark(node)
        types = [init.type for init in inits]
        op, results = e.multi("scf.for", types, [*bounds, *inits], attributes, regions=1)
        block, args = e.block(op.regions[0], [bounds[0].type, *types])
        with e.inside(block):
            bind(args[1:])
            assign(frame, node.target, _variable(frame, args[0], bounds, variable, backwards))
            frame.names[BROKEN] = False
            frame.execute(node.body)
        return Attempt(op, results, block, frame.names, frame.spans)

    names = assigned(node.body) - set(hidden)
    _carry(frame, node, names, (), construct)


def _breakable_for(
    frame: Frame, node: ast.For, loop: ranges.range, hidden: tuple[str, ...]
) -> None:
    e = frame.e
    bounds, variable, backwards = _bounds(frame, loop)

    def condition() -> bool | Tensor:
        inside = arithmetic.compare(e, frame.names[_INDEX], bounds[1], "<")
        broken = frame.names[BROKEN]
        if not isinstance(broken, Tensor):
            return inside
        return arithmetic.and_(e, inside, arithmetic.invert(e, broken))

    def body() -> None:
        index = frame.names[_INDEX]
        assign(frame, node.target, _variable(frame, index, bounds, variable, backwards))
        _run_body(frame, node)
        frame.mark(node)
        frame.names[_INDEX] = arithmetic.add(e, index, bounds[2])

    with _hidden_names(frame, {_INDEX: bounds[0], BROKEN: False}):
        names = assigned(node.body) - set(hidden)
        _carry(frame, node, names, (_INDEX, BROKEN), _while_construct(frame, node, condition, body))


def while_loop(frame: Frame, node: ast.While) -> Flow:
    """Rule for `while`."""
    if node.orelse:
        raise frame.located(UnsupportedSyntax("'else' on a loop", "test a flag after it"), node)

    def test() -> bool | Tensor:
        value = frame.eval(node.test)
        if isinstance(value, ranges.condition):
            value = value.value
        frame.mark(node.test)
        return require_condition(frame, value, "'while'")

    def condition() -> bool | Tensor:
        broken = frame.names[BROKEN]
        return _unless(frame, node, broken, test) if isinstance(broken, Tensor) else test()

    with _hidden_names(frame, {BROKEN: False}):
        construct = _while_construct(frame, node, condition, lambda: _run_body(frame, node))
        _carry(frame, node, assigned(node.body), (BROKEN,), construct)
    return None


class _hidden_names:
    """Gives hidden names their values for the duration of one loop."""

    def __init__(self, frame: Frame, values: dict[str, Any]) -> None:
        self.frame, self.values = frame, values

    def __enter__(self) -> None:
        self.saved = {name: self.frame.names.get(name) for name in self.values}
        self.frame.names.update(self.values)

    def __exit__(self, *_: object) -> None:
        for name, value in self.saved.items():
            if value is None:
                self.frame.names.pop(name, None)
            else:
                self.frame.names[name] = value


def _unless(frame: Frame, node: ast.AST, broken: Tensor, test: Callable[[], Any]) -> Tensor:
    """`not broken and test()`, where the test is not evaluated after a break."""
    keep_on = arithmetic.invert(frame.e, broken)
    holder, blocks, values = emit_if(frame, node, keep_on, [test, lambda: False])
    form = merging.Slot(dtypes.int1)
    result: Tensor = finish_if(frame, holder, keep_on, blocks, values, form)
    return result


def _run_body(frame: Frame, node: ast.For | ast.While) -> None:
    if frame.execute(node.body) == Jumped("break"):
        frame.names[BROKEN] = True


def _while_construct(
    frame: Frame,
    node: ast.For | ast.While,
    condition: Callable[[], bool | Tensor],
    body: Callable[[], None],
) -> Construct:
    e = frame.e

    def construct(inits: list[Tensor], bind: Callable[[Sequence[Tensor]], None]) -> Attempt | None:
        frame.mark(node)
        types = [init.type for init in inits]
        op, results = e.multi("scf.while", types, inits, regions=2)
        before, arguments = e.block(op.regions[0], types)
        with e.inside(before), frame.scope():
            bind(arguments)
            holds = condition()
            frame.mark(node)
            if holds is False:
                op.erase()
                return None
            endless = holds is True and not isinstance(frame.names[BROKEN], Tensor)
            proceed = e.constant(dtypes.int1, True) if holds is True else holds
            e.effect("scf.condition", [proceed, *arguments])
        after, arguments = e.block(op.regions[1], types)
        with e.inside(after):
            bind(arguments)
            entering = dict(frame.names)
            body()
        # a constant that changes becomes a run-time value in the next attempt, which may break
        steady = all(
            isinstance(value, Tensor) or frame.names.get(name) is value
            for name, value in entering.items()
        )
        if endless and frame.names[BROKEN] is False and steady:
            raise frame.located(EndlessLoop(), node)
        return Attempt(op, results, after, frame.names, frame.spans)

    return construct


def _carry(
    frame: Frame,
    node: ast.For | ast.While,
    names: frozenset[str],
    hidden: tuple[str, ...],
    construct: Construct,
) -> None:
    """Builds the loop until the types of the carried names are stable, then binds its results."""
    live = frame.live.head[id(node)] | frame.live.after[id(node)]
    values = {
        name: frame.names[name]
        for name in (*hidden, *sorted(names & live))
        if name in frame.names and not isinstance(frame.names[name], Unusable)
    }
    forms = {name: merging.form_of(value) for name, value in values.items()}
    outer, frame.loop = frame.loop, LoopContext(live)
    try:
        done = _attempts(frame, node, values, forms, construct)
    finally:
        frame.loop = outer
    frame.mark(node)
    if done is None:
        return
    with frame.e.inside(done.body):
        ends = [x for n, f in forms.items() for x in merging.lower(frame.e, done.names[n], f)]
        frame.e.effect("scf.yield", ends)
    results = iter(done.results)
    for name, form in forms.items():
        frame.names[name] = merging.fill(form, results)
        frame.spans[name] = done.spans.get(name, frame.span(node))
    for name in names - forms.keys():
        if name not in frame.names:
            where = "inside a loop that may not run at all"
            frame.names[name] = Unusable(MaybeUndefined(name, where, done.spans.get(name)))


def _attempts(
    frame: Frame,
    node: ast.For | ast.While,
    values: dict[str, Any],
    forms: dict[str, Any],
    construct: Construct,
) -> Attempt | None:
    """Repeats `construct` while carried constants turn out to change; updates `forms`."""
    while True:
        frame.mark(node)
        inits = [x for n, f in forms.items() for x in merging.lower(frame.e, values[n], f)]

        def bind(arguments: Sequence[Tensor]) -> None:
            remaining = iter(arguments)
            for name, form in forms.items():
                frame.names[name] = merging.fill(form, remaining)

        with frame.scope():
            attempt = construct(inits, bind)
        if attempt is None or not _revise(frame, forms, attempt):
            return attempt
        attempt.op.erase()


def _revise(frame: Frame, forms: dict[str, Any], attempt: Attempt) -> bool:
    """Joins each name's form with its value after an iteration; whether any form changed."""
    changed = False
    for name, form in list(forms.items()):
        end = attempt.names[name]
        if isinstance(end, Unusable):
            del forms[name]
            frame.names[name] = end
            changed = True
            continue
        try:
            joined = merging.join(form, end)
        except merging.Mismatch:
            mistake = LoopTypeChange(
                name, merging.describe(form), merging.describe(end), frame.spans.get(name)
            )
            mistake.span = attempt.spans.get(name)
            raise mistake from None
        if not merging.same_form(form, joined):
            forms[name] = joined
            changed = True
    return changed
