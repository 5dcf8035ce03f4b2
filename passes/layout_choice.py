"""Decides the layout of every tile value before anything is rewritten.

A value is *placed* where its layout matters: results of loads, dots, reductions, and what is
computed from them; loop-carried values. Everything that can be recomputed cheaply in any layout
(ranges, splats, broadcasts, address arithmetic) stays unplaced and is rematerialised on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minitriton.ir.axis import is_separable
from minitriton.ir.linear_layout import LinearLayout
from minitriton.ir.mlir import ir
from minitriton.ir.reduction import is_scannable, scan_layout
from minitriton.passes.access_layouts import AccessLayouts
from minitriton.passes.dot_layouts import DotPlan, plan_dot
from minitriton.passes.op_classes import (
    MEMORY_ACCESS,
    SEVERAL_RESULTS,
    is_elementwise,
    is_tile,
    tile_operands,
)
from minitriton.passes.traversal import Value, int_array, int_attribute, ops_of, terminator_of

ACCESS, ACCUMULATOR = 1, 2  # priorities: what a value's layout was made for
LAZY = frozenset(("mt.make_range", "mt.splat", "arith.constant", "mt.expand_dims", "mt.broadcast"))
DEMAND_DEPTH = 12


@dataclass(frozen=True)
class Placement:
    """A value's layout and its weight where operands of one op disagree."""

    layout: LinearLayout
    priority: int


class LayoutChoice:
    """Placements of the values of one function, and the plans of its dots."""

    def __init__(self, access: AccessLayouts, num_warps: int, *, wgmma: bool = False) -> None:
        self.access = access
        self.num_warps = num_warps
        self.wgmma = wgmma
        self.placed: dict[Value, Placement] = {}
        self._dots: dict[ir.Operation, DotPlan] = {}

    # What emission asks

    def layout(self, value: Value) -> LinearLayout | None:
        """The layout of a placed value; None for one that is rematerialised."""
        found = self.placed.get(value)
        return found.layout if found else None

    def dot_plan(self, op: ir.Operation) -> DotPlan:
        """Layouts of an mt.dot."""
        plan = self._dots.get(op)
        if plan is None:
            plan = self._dots[op] = plan_dot(op, self.num_warps, wgmma=self.wgmma)
        return plan

    def operand_layout(self, op: ir.Operation) -> LinearLayout:
        """The one layout that all tile operands (and results) of `op` take."""
        name = op.name
        if name in MEMORY_ACCESS:
            return self._access_layout(op)
        tiles = tile_operands(op)
        best = self._best(tiles)
        layout = best.layout if best else self.access.default(tuple(tiles[0].type.shape))
        axis = int_attribute(op, "axis") if name in ("mt.reduce", "mt.scan") else 0
        if name == "mt.scan" and not is_scannable(layout, axis):
            return scan_layout(layout, axis)
        if name == "mt.reduce" and not is_separable(layout, axis):
            return scan_layout(layout, axis)
        return layout

    def split_operand(self, op: ir.Operation) -> LinearLayout:
        """A layout of mt.split's operand in which the halves are told apart by a register bit."""
        best = self._best(op.operands)
        if best and best.layout.can_split():
            return best.layout
        return self.access.default(tuple(op.results[0].type.shape)).join()

    def _best(self, values: Sequence[Value]) -> Placement | None:
        found = [self.placed[v] for v in values if v in self.placed]
        return max(found, key=lambda p: p.priority) if found else None

    def _access_layout(self, op: ir.Operation) -> LinearLayout:
        coalesced = self.access.of(op)
        first = 0 if op.name == "mt.load" else 1
        own = self._best([op.operands[first]]) or self._best([op.operands[0]])
        if own is None:
            return coalesced
        if own.layout == coalesced or op.name.startswith("mt.atomic"):
            return own.layout
        return own.layout if self.access.suits(op, own.layout) else coalesced

    # The walk

    def visit_block(self, block: ir.Block) -> None:
        """Places the results of all ops of `block`."""
        for op in ops_of(block):
            name = op.name
            rule = RULES.get(name)
            if rule is not None:
                rule(self, op)
            elif is_elementwise(name):
                self._elementwise(op)

    def place(self, value: Value, layout: LinearLayout, priority: int) -> None:
        self.placed[value] = Placement(layout, priority)

    def _elementwise(self, op: ir.Operation) -> None:
        best = self._best(tile_operands(op))
        for result in op.results:
            if best is not None and is_tile(result):
                self.placed[result] = best
            else:
                self.placed.pop(result, None)

    def _load(self, op: ir.Operation) -> None:
        for result in op.results:
            if is_tile(result):
                self.place(result, self._access_layout(op), ACCESS)

    def _dot(self, op: ir.Operation) -> None:
        self.place(op.results[0], self.dot_plan(op).c, ACCUMULATOR)

    def _reduce(self, op: ir.Operation) -> None:
        best = self._best(op.operands)
        result = self.operand_layout(op).slice(int_attribute(op, "axis"))
        for value in op.results:
            if is_tile(value):
                self.place(value, result, best.priority if best else ACCESS)

    def _scan(self, op: ir.Operation) -> None:
        best = self._best(op.operands)
        layout = self.operand_layout(op)
        for value in op.results:
            self.place(value, layout, best.priority if best else ACCESS)

    def _gather(self, op: ir.Operation) -> None:
        """The result lies where its indices do."""
        best = self._best(list(op.operands)[1:])
        layout = best.layout if best else self.access.default(tuple(op.results[0].type.shape))
        self.place(op.results[0], layout, best.priority if best else ACCESS)

    def _histogram(self, op: ir.Operation) -> None:
        layout = self.access.default(tuple(op.results[0].type.shape))
        self.place(op.results[0], layout, ACCESS)

    def _several(self, op: ir.Operation) -> None:
        """Results in the layout of the operands; placed, so that nothing is computed twice."""
        if is_tile(op.results[0]):
            self._scan(op)

    def _image(self, op: ir.Operation) -> None:
        """trans and reshape of a placed tile keep its registers; else they stay unplaced."""
        source = self.placed.get(op.operands[0])
        result = op.results[0]
        if source is None:
            self.placed.pop(result, None)
        else:
            self.place(result, image(op, source.layout), source.priority)

    def _join(self, op: ir.Operation) -> None:
        if op.name == "mt.join" and self._best(op.operands) is None:
            self.placed.pop(op.results[0], None)
            return
        layout = self.operand_layout(op)
        if op.name == "mt.join":
            self.place(op.results[0], layout.join(), ACCESS)
        else:
            self.place(op.results[0], layout.cat(int_attribute(op, "axis")), ACCESS)

    def _split(self, op: ir.Operation) -> None:
        layout = self.split_operand(op).split()
        for value in op.results:
            self.place(value, layout, ACCESS)

    # Control flow: a carried value has one layout all along

    def _for(self, op: ir.Operation) -> None:
        body = op.regions[0].blocks[0]
        inits = list(op.operands)[3:]
        arguments = list(body.arguments)[1:]
        current = [self.placed.get(init) for init in inits]
        while True:
            self._carry(arguments, current)
            self.visit_block(body)
            yielded = [self.placed.get(v) for v in terminator_of(body).operands]
            merged = list(map(_stronger, current, yielded))
            if merged == current:
                merged = [
                    found or self._demanded_carried(argument, result)
                    for found, argument, result in zip(merged, arguments, op.results, strict=True)
                ]
                if merged == current:
                    break
            current = merged
        self._carry(op.results, current)

    def _carry(self, values: Sequence[Value], placements: Sequence[Placement | None]) -> None:
        for value, placement in zip(values, placements, strict=True):
            if placement is None:
                self.placed.pop(value, None)
            else:
                self.placed[value] = placement

    def _demanded_carried(self, *values: Value) -> Placement | None:
        """For a carried tile that nothing inside places: what its users want, else a default."""
        if not is_tile(values[0]):
            return None
        for value in values:
            wanted = self._demand(value, DEMAND_DEPTH)
            if wanted is not None:
                return Placement(wanted, ACCESS)
        return Placement(self.access.default(tuple(values[0].type.shape)), ACCESS)

    def _if(self, op: ir.Operation) -> None:
        branches = []
        for region in op.regions:
            for block in region.blocks:
                self.visit_block(block)
                branches.append([self.placed.get(v) for v in terminator_of(block).operands])
        if not len(op.results):
            return
        for result, *found in zip(op.results, *branches, strict=True):
            best = found[0]
            for other in found[1:]:
                best = _stronger(best, other)
            self._carry([result], [best or self._demanded_carried(result)])

    def _while(self, op: ir.Operation) -> None:
        before, after = (region.blocks[0] for region in op.regions)
        carried = [
            self.placed.get(init) or self._demanded_carried(argument)
            for init, argument in zip(op.operands, before.arguments, strict=True)
        ]
        self._carry(list(before.arguments), carried)
        self.visit_block(before)
        passed = [
            self.placed.get(value) or self._demanded_carried(argument)
            for value, argument in zip(
                list(terminator_of(before).operands)[1:], after.arguments, strict=True
            )
        ]
        self._carry(list(after.arguments), passed)
        self.visit_block(after)
        self._carry(op.results, passed)

    def _demand(self, value: Value, depth: int) -> LinearLayout | None:
        """The layout in which some user of an unplaced value will ask for it."""
        for use in value.uses:
            user = use.owner.operation
            wanted = self._demand_of_user(user, use.operand_number, depth)
            if wanted is not None:
                return wanted
        return None

    def _demand_of_user(self, user: ir.Operation, operand: int, depth: int) -> LinearLayout | None:
        name = user.name
        if name in MEMORY_ACCESS:
            return self._access_layout(user)
        if name == "mt.dot":
            return self.dot_plan(user).c if operand == 2 else None
        if not len(user.results) or depth == 0:
            return None
        result = user.results[0]
        if is_elementwise(name) and is_tile(result):
            return self.layout(result) or self._demand(result, depth - 1)
        if name in PREIMAGES and name != "mt.join":
            wanted = self.layout(result) or self._demand(result, depth - 1)
            return preimage(user, wanted) if wanted is not None else None
        return None


def _stronger(one: Placement | None, other: Placement | None) -> Placement | None:
    """The placement of higher priority, the first of equals."""
    if one is None or other is None:
        return one or other
    return other if other.priority > one.priority else one


def image(op: ir.Operation, layout: LinearLayout) -> LinearLayout:
    """Layout of the result of trans or reshape whose operand has `layout`."""
    if op.name == "mt.trans":
        return layout.transpose(int_array(op, "order"))
    return layout.reshape(tuple(op.results[0].type.shape))


def _before_broadcast(op: ir.Operation, layout: LinearLayout) -> LinearLayout:
    source, result = op.operands[0].type.shape, op.results[0].type.shape
    dims = [d for d, (a, b) in enumerate(zip(source, result, strict=True)) if a != b]
    return layout.broadcast_source(dims)


def _before_trans(op: ir.Operation, layout: LinearLayout) -> LinearLayout:
    order = int_array(op, "order")
    return layout.transpose([order.index(d) for d in range(len(order))])


PREIMAGES: dict[str, Callable[[ir.Operation, LinearLayout], LinearLayout]] = {
    "mt.expand_dims": lambda op, layout: layout.drop_dim(int_attribute(op, "axis")),
    "mt.broadcast": _before_broadcast,
    "mt.trans": _before_trans,
    "mt.reshape": lambda op, layout: layout.reshape(tuple(op.operands[0].type.shape)),
}


def preimage(op: ir.Operation, layout: LinearLayout) -> LinearLayout:
    """Layout that the operand of a shape op needs so that the result has `layout`."""
    return PREIMAGES[op.name](op, layout)


def _unplaced(choice: LayoutChoice, op: ir.Operation) -> None:
    choice.placed.pop(op.results[0], None)


RULES: dict[str, Callable[[LayoutChoice, ir.Operation], None]] = {
    **dict.fromkeys(LAZY, _unplaced),
    "mt.load": LayoutChoice._load,
    "mt.atomic_rmw": LayoutChoice._load,
    "mt.atomic_cas": LayoutChoice._load,
    "mt.dot": LayoutChoice._dot,
    "mt.reduce": LayoutChoice._reduce,
    "mt.scan": LayoutChoice._scan,
    "mt.trans": LayoutChoice._image,
    "mt.reshape": LayoutChoice._image,
    "mt.join": LayoutChoice._join,
    "mt.cat": LayoutChoice._join,
    "mt.flip_blocks": LayoutChoice._scan,
    "mt.gather": LayoutChoice._gather,
    "mt.histogram": LayoutChoice._histogram,
    **dict.fromkeys(SEVERAL_RESULTS, LayoutChoice._several),
    "mt.split": LayoutChoice._split,
    "scf.for": LayoutChoice._for,
    "scf.if": LayoutChoice._if,
    "scf.while": LayoutChoice._while,
}
