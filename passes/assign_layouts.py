"""Gives every tile a layout by building the function anew.

    before: tensor<128x64xf32>      after: tensor<128x64xf32, {register=.., lane=.., warp=..}>

Requires: no layouts. Ensures: the laws of `verify_layouts`; mt.convert_layout only where a placed
value is wanted in another layout. Unplaced values (addresses, masks, constants) are cloned per
layout next to their definition; conversions also stand there, so invariant ones leave loops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from minitriton.ir.axis_analysis import analyse
from minitriton.ir.builder import Builder
from minitriton.ir.encoding import encode
from minitriton.ir.linear_layout import LinearLayout
from minitriton.ir.mlir import ir
from minitriton.ir.target import Target
from minitriton.passes.access_layouts import AccessLayouts
from minitriton.passes.layout_choice import PREIMAGES, LayoutChoice, image, preimage
from minitriton.passes.op_classes import (
    MEMORY_ACCESS,
    is_elementwise,
    is_tile,
    tile_operands,
    widens,
)
from minitriton.passes.tile_pass import PassOptions
from minitriton.passes.traversal import (
    Value,
    attributes_of,
    block_of,
    int_attribute,
    kernel_of,
    ops_of,
    splat_constant,
    walk,
)
from minitriton.passes.warpgroup_dots import available


def run(module: ir.Module, target: Target, options: PassOptions) -> None:
    """Replaces the kernel by one whose tiles carry layouts."""
    function = kernel_of(module)
    num_warps = int_attribute(module.operation, "mt.num_warps", 4)
    accesses = [op for op in walk(function) if op.name in MEMORY_ACCESS and is_tile(op.operands[0])]
    access = AccessLayouts(accesses, analyse(function), num_warps)
    choice = LayoutChoice(access, num_warps, wgmma=available(function, target, options))
    choice.visit_block(function.regions[0].blocks[0])
    _Emitter(choice).function(function)
    function.erase()


@dataclass
class _Frame:
    """A block under construction; `nested` is the op whose region is being filled, if any."""

    old: ir.Block
    new: ir.Block
    nested: ir.Operation | None = None

    def insertion_point(self) -> ir.InsertionPoint:
        return ir.InsertionPoint(self.nested) if self.nested else ir.InsertionPoint(self.new)


class _Emitter:
    """Builds the new function; maps old values to new ones."""

    def __init__(self, choice: LayoutChoice) -> None:
        self.choice = choice
        self.values: dict[Value, Value] = {}  # scalars, and placed tiles in their own layout
        self.forms: dict[tuple[Value, LinearLayout], Value] = {}
        self.frames: list[_Frame] = []
        self.types: dict[tuple[ir.Type, LinearLayout], ir.Type] = {}
        self.builder: Builder

    # Function and blocks

    def function(self, old: ir.Operation) -> None:
        new = ir.Operation.create(
            old.name, [], [], attributes_of(old), None, 1, old.location, ir.InsertionPoint(old)
        )
        entry = old.regions[0].blocks[0]
        self.builder = Builder(ir.InsertionPoint(new), old.location)
        self._block(entry, new.regions[0], [a.type for a in entry.arguments])

    def _block(self, old: ir.Block, region: ir.Region, types: list[ir.Type]) -> ir.Block:
        locations = [old.owner.operation.location] * len(types)
        new = ir.Block.create_at_start(region, types, locations)
        for before, after in zip(old.arguments, new.arguments, strict=True):
            self.values[before] = after
        self.frames.append(_Frame(old, new))
        for op in ops_of(old):
            self.builder.ip, self.builder.loc = ir.InsertionPoint(new), op.location
            self._op(op)
        self.frames.pop()
        return new

    def _op(self, op: ir.Operation) -> None:
        rule = RULES.get(op.name)
        if rule is not None:
            rule(self, op)
        elif not any(map(is_tile, op.results)) and not tile_operands(op):
            self._create(op, [r.type for r in op.results], [self.values[v] for v in op.operands])
        elif op.name in PREIMAGES or is_elementwise(op.name) or op.name in _SOURCES:
            layout = self.choice.layout(op.results[0])
            if layout is not None:  # unplaced results are made when they are wanted
                self.values[op.results[0]] = self._compute(op, layout)
        else:
            self._uniform(op)

    def _create(
        self,
        op: ir.Operation,
        types: list[ir.Type],
        operands: list[Value],
        extra: dict[str, ir.Attribute] | None = None,
    ) -> ir.Operation:
        """The new form of `op`, at the end of the current block; maps its results."""
        attributes = attributes_of(op) | (extra or {})
        new = self.builder.create(op.name, types, operands, attributes, len(op.regions))
        for before, after in zip(op.results, new.results, strict=True):
            self.values[before] = after
        return new

    # Values in layouts

    def typed(self, type_: ir.Type, layout: LinearLayout) -> ir.Type:
        """`type_` of a tile, with its layout."""
        key = (type_, layout)
        found = self.types.get(key)
        if found is None:
            found = self.types[key] = ir.RankedTensorType.get(
                list(layout.shape), type_.element_type, encoding=encode(layout)
            )
        return found

    def own_type(self, value: Value) -> ir.Type:
        """New type of a scalar or a placed tile."""
        layout = self.choice.layout(value)
        return value.type if layout is None else self.typed(value.type, layout)

    def scalar_or(self, value: Value, layout: LinearLayout | None) -> Value:
        """The new value; a tile in `layout` (in its own layout for None)."""
        if not is_tile(value):
            return self.values[value]
        layout = layout or self.choice.layout(value)
        return self.tile(value, layout or self.choice.access.default(tuple(value.type.shape)))

    def tile(self, value: Value, layout: LinearLayout) -> Value:
        """`value` in `layout`: itself, a clone of its cheap producer, or a conversion."""
        own = self.choice.layout(value)
        if own == layout:
            return self.values[value]
        found = self.forms.get((value, layout))
        if found is not None:
            return found
        home = block_of(value)
        frame = next(f for f in reversed(self.frames) if f.old == home)
        maker = None if isinstance(value, ir.BlockArgument) else value.owner.operation
        location = maker.location if maker else self.builder.loc
        with self.builder.at(frame.insertion_point(), location):
            if own is None or (maker is not None and (widens(maker) or self._masks(maker))):
                assert maker is not None, "loop-carried tiles are always placed"
                made = self._compute(maker, layout)
            else:
                made = self.builder.op(
                    "mt.convert_layout", self.typed(value.type, layout), [self.values[value]]
                )
        self.forms[value, layout] = made
        return made

    def _masks(self, op: ir.Operation) -> bool:
        """Whether `op` selects elements of one placed tile: as well done after its conversion."""
        placed = [v for v in tile_operands(op) if self.choice.layout(v) is not None]
        return op.name == "arith.select" and len(placed) == 1

    def _compute(self, op: ir.Operation, layout: LinearLayout) -> Value:
        """The only result of `op`, made in `layout` at the builder's insertion point."""
        name = op.name
        if name == "mt.join":
            return self._joined(op, layout)
        source = preimage(op, layout) if name in PREIMAGES else layout
        if name in _IMAGES and (own := self.choice.layout(op.operands[0])):
            moved = image(op, own)
            source = own if moved == layout else source
        operands = [self.scalar_or(v, source) for v in op.operands]
        type_ = self.typed(op.results[0].type, layout)
        attributes = attributes_of(op)
        if name == "arith.constant":
            attributes["value"] = _retyped(op, type_)
        return self.builder.op(name, type_, operands, attributes)

    def _joined(self, op: ir.Operation, layout: LinearLayout) -> Value:
        """A join of unplaced tiles: where a thread's registers hold both halves, nothing moves."""
        own = self.choice.access.default(tuple(op.operands[0].type.shape))
        half = layout.split() if layout.can_split() else own
        type_ = self.typed(op.results[0].type, half.join())
        joined = self.builder.op(op.name, type_, [self.scalar_or(v, half) for v in op.operands])
        if half.join() == layout:
            return joined
        return self.builder.op(
            "mt.convert_layout", self.typed(op.results[0].type, layout), [joined]
        )

    # Op families

    def _uniform(self, op: ir.Operation) -> None:
        """All tile operands and results in one layout: memory ops, assert, print."""
        layout = self.choice.operand_layout(op)
        operands = [self.scalar_or(v, layout) for v in op.operands]
        types = [self.typed(r.type, layout) if is_tile(r) else r.type for r in op.results]
        self._create(op, types, operands)

    def _print(self, op: ir.Operation) -> None:
        """Operands may differ in shape: each is printed in a layout of its own."""
        self._create(op, [], [self.scalar_or(v, None) for v in op.operands])

    def _dot(self, op: ir.Operation) -> None:
        plan = self.choice.dot_plan(op)
        a, b, c = op.operands
        operands = [self.tile(a, plan.a), self.tile(b, plan.b), self.tile(c, plan.c)]
        if plan.warps is None:
            extra: dict[str, ir.Attribute] = {"mt.fma": ir.UnitAttr.get()}
        else:
            extra = {"mt.warps": ir.DenseI32ArrayAttr.get(list(plan.warps))}
        self._create(op, [self.typed(op.results[0].type, plan.c)], operands, extra)

    def _fold(self, op: ir.Operation) -> None:
        """reduce, scan and map: the region moves over; it may refer to constants outside."""
        layout = self.choice.operand_layout(op)
        operands = [self.tile(v, layout) for v in op.operands]
        new = self._create(op, [self.own_type(r) for r in op.results], operands)
        op.regions[0].blocks[0].append_to(new.regions[0])
        for inner in walk(new):
            for index, value in enumerate(inner.operands):
                replacement = self.values.get(value)
                if replacement is not None:
                    inner.operands[index] = replacement

    def _split(self, op: ir.Operation) -> None:
        operand = self.tile(op.operands[0], self.choice.split_operand(op))
        self._create(op, [self.own_type(r) for r in op.results], [operand])

    def _join(self, op: ir.Operation) -> None:
        if op.name == "mt.join" and self.choice.layout(op.results[0]) is None:
            return  # made when it is wanted
        layout = self.choice.operand_layout(op)
        operands = [self.tile(v, layout) for v in op.operands]
        self._create(op, [self.own_type(op.results[0])], operands)

    def _gather(self, op: ir.Operation) -> None:
        source, index = op.operands
        layout = self.choice.layout(op.results[0])
        operands = [self.scalar_or(source, None), self.scalar_or(index, layout)]
        self._create(op, [self.own_type(op.results[0])], operands)

    def _histogram(self, op: ir.Operation) -> None:
        layout = self.choice.operand_layout(op)
        operands = [self.scalar_or(v, layout) for v in op.operands]
        self._create(op, [self.own_type(op.results[0])], operands)

    # Control flow

    def _carried(self, values: list[Value], like: list[Value]) -> list[Value]:
        """New forms of `values` in the layouts of `like`."""
        return [
            self.scalar_or(value, self.choice.layout(target))
            for value, target in zip(values, like, strict=True)
        ]

    def _for(self, op: ir.Operation) -> None:
        body = op.regions[0].blocks[0]
        arguments = list(body.arguments)
        bounds = [self.values[v] for v in list(op.operands)[:3]]
        inits = self._carried(list(op.operands)[3:], arguments[1:])
        new = self._create(op, [self.own_type(r) for r in op.results], bounds + inits)
        self._region(body, new, 0)

    def _while(self, op: ir.Operation) -> None:
        before, after = (region.blocks[0] for region in op.regions)
        inits = self._carried(list(op.operands), list(before.arguments))
        new = self._create(op, [self.own_type(r) for r in op.results], inits)
        self._region(before, new, 0)
        self._region(after, new, 1)

    def _if(self, op: ir.Operation) -> None:
        types = [self.own_type(r) for r in op.results]
        new = self._create(op, types, [self.values[op.operands[0]]])
        for index, region in enumerate(op.regions):
            for block in region.blocks:
                self._region(block, new, index)

    def _region(self, block: ir.Block, new: ir.Operation, index: int) -> None:
        frame = self.frames[-1]
        frame.nested = new
        self._block(block, new.regions[index], [self.own_type(a) for a in block.arguments])
        frame.nested = None

    def _yield(self, op: ir.Operation) -> None:
        parent = op.parent.operation
        if parent.name == "scf.for":
            like = list(parent.regions[0].blocks[0].arguments)[1:]
        elif parent.name == "scf.if":
            like = list(parent.results)
        else:
            like = list(parent.regions[0].blocks[0].arguments)
        self._create(op, [], self._carried(list(op.operands), like))

    def _condition(self, op: ir.Operation) -> None:
        like = list(op.parent.operation.regions[1].blocks[0].arguments)
        condition, *passed = op.operands
        self._create(op, [], [self.values[condition], *self._carried(passed, like)])


def _retyped(op: ir.Operation, type_: ir.Type) -> ir.Attribute:
    """The value of a constant tile under a type with a layout."""
    scalar = splat_constant(op)
    assert scalar is not None, "the frontend makes splat constants only"
    return ir.DenseElementsAttr.get_splat(type_, scalar)


_SOURCES = frozenset(("mt.make_range", "mt.splat", "arith.constant"))
_IMAGES = frozenset(("mt.trans", "mt.reshape"))

RULES: dict[str, Callable[[_Emitter, ir.Operation], None]] = {
    "mt.dot": _Emitter._dot,
    "mt.reduce": _Emitter._fold,
    "mt.scan": _Emitter._fold,
    "mt.map_elementwise": _Emitter._fold,
    "mt.split": _Emitter._split,
    "mt.join": _Emitter._join,
    "mt.cat": _Emitter._join,
    "mt.flip_blocks": _Emitter._join,
    "mt.gather": _Emitter._gather,
    "mt.histogram": _Emitter._histogram,
    "mt.print": _Emitter._print,
    "scf.for": _Emitter._for,
    "scf.while": _Emitter._while,
    "scf.if": _Emitter._if,
    "scf.yield": _Emitter._yield,
    "scf.condition": _Emitter._condition,
}
