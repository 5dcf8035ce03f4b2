"""scf.for, scf.while and scf.if over tiles: one loop-carried value per register that is needed.

The body of a scf.for is lowered first, in a block of its own; a register of a loop-carried tile
becomes a block argument when something reads it. A tile of pointers that is stepped through the
loop so costs one value per vector access, not one per element. Sums of a warpgroup_dot that begin
at zero are left undefined: its first instruction ignores them in the first iteration. Others that
begin at zero get their zeros in front of the loop, whether it runs or not: where LLVM sets them on
the way past it, ptxas takes that for a write among products in flight (C7515). Sums of f16 that
tensor cores make stay in pairs, since taking them apart would be a use of products in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from minitriton.codegen.emit import attribute
from minitriton.codegen.tile import LazyRegisters, Tile, carried
from minitriton.ir.dialect import element_of
from minitriton.ir.encoding import layout_of
from minitriton.ir.mlir import ir

if TYPE_CHECKING:
    from minitriton.codegen.lower import Lowering

ACCUMULATOR = 2  # operand of a warpgroup_dot
NO_UNROLL = "#llvm.loop_annotation<unroll = <disable = true>>"


class _CarriedValues:
    """The loop-carried values of a scf.for: grows while its body and yields are lowered."""

    def __init__(self, lowering: Lowering, op: ir.Operation, block: ir.Block) -> None:
        self.lowering = lowering
        self.block = block
        self.loc = op.location
        self.inits = list(op.operands)[3:]
        self.in_words = _in_words(op)
        self.slots: list[tuple[int, int]] = []  # (iter arg, register) of each block argument

    def bind(self, index: int, parameter: ir.Value) -> None:
        """Records what the body sees as iter arg `index`: `parameter` of the tile IR."""
        lowering, type_ = self.lowering, parameter.type
        if not isinstance(type_, ir.RankedTensorType):
            lowering.set(parameter, self._add(index, 0, carried(type_)))
            return
        layout, element = layout_of(type_), carried(type_.element_type)
        if index in self.in_words:
            count = len(layout.registers) // 2
            words = [self._add(index, number, lowering.i32) for number in range(count)]
            lowering.set_words(parameter, words)
            return
        registers = LazyRegisters(
            layout.num_registers, lambda register: self._add(index, register, element)
        )
        lowering.set(parameter, Tile(layout, element, registers))

    def _add(self, index: int, register: int, type_: ir.Type) -> ir.Value:
        self.slots.append((index, register))
        return self.block.add_argument(type_, self.loc)

    def yields(self, yielded: Sequence[ir.Value]) -> list[ir.Value]:
        """The next values of all arguments; reading them may ask for more arguments."""
        words = self._words(yielded)
        values: list[ir.Value] = []
        while len(values) < len(self.slots):
            index, register = self.slots[len(values)]
            held = words.get(index) or self.lowering.registers(yielded[index])
            values.append(held[register])
        return values

    def initial(
        self, undefined: Sequence[int] = (), in_place: Sequence[int] = ()
    ) -> list[ir.Value]:
        """The first values of all arguments; anything for the iter args in `undefined`, registers
        that are set here and not later for those in `in_place`."""
        words = self._words(self.inits)
        values = [
            self.lowering.op("llvm.mlir.poison", self.block.arguments[1 + number].type)
            if index in undefined
            else (words.get(index) or self.lowering.registers(self.inits[index]))[register]
            for number, (index, register) in enumerate(self.slots)
        ]
        for sums in in_place:
            places = [number for number, (index, _) in enumerate(self.slots) if index == sums]
            for number, value in zip(places, self._kept([values[n] for n in places]), strict=True):
                values[number] = value
        return values

    def _kept(self, values: Sequence[ir.Value]) -> list[ir.Value]:
        """The values as LLVM cannot make them again elsewhere."""
        letter = "f" if values[0].type == self.lowering.f32 else "r"
        tied = [str(number) for number in range(len(values))]
        constraints = ",".join([f"={letter}"] * len(values) + tied)
        return self.lowering.asm("", constraints, [value.type for value in values], values)

    def finish(self, op: ir.Operation, used: Sequence[int], results: Sequence[ir.Value]) -> None:
        """Records those of the loop's results that are used; results: one for each argument."""
        place = {slot: results[i] for i, slot in enumerate(self.slots)}
        for index in used:
            result = op.results[index]
            numbers: Sequence[int] = (0,)
            if isinstance(result.type, ir.RankedTensorType):
                numbers = layout_of(result.type).registers
            if index in self.in_words:
                words = [place[index, number] for number in range(len(numbers) // 2)]
                self.lowering.set_words(result, words)
            else:
                values = [place[index, register] for register in numbers]
                self.lowering.set_registers(result, values)

    def _words(self, values: Sequence[ir.Value]) -> dict[int, list[ir.Value]]:
        return {index: self.lowering.words(values[index]) for index in self.in_words}


def _for(lowering: Lowering, op: ir.Operation) -> None:
    body = op.regions[0].blocks[0]
    parameters = list(body.arguments)
    bounds = [lowering.scalar(v) for v in list(op.operands)[:3]]
    sums = _sums_from_zero(lowering, op)
    zeros = _zeros_in_flight(lowering, op, sums)
    # a region to build the body in: the loop itself needs to know its arguments first
    holder = ir.Operation.create("scf.execute_region", [], [], None, None, 1, op.location)
    block = holder.regions[0].blocks.append(parameters[0].type, arg_locs=[op.location])
    carried_values = _CarriedValues(lowering, op, block)
    lowering.set(parameters[0], block.arguments[0])
    used = [index for index, result in enumerate(op.results) if _is_used(result)]
    with lowering.builder.at(ir.InsertionPoint(block)):
        for index, parameter in enumerate(parameters[1:]):
            carried_values.bind(index, parameter)
        for index in sums:
            counts = lowering.compare("ne", block.arguments[0], bounds[0])
            lowering.counted_sums[parameters[1 + index]] = counts
        terminator = lowering.lower_block(body)
        for index in used:
            lowering.held(parameters[index + 1])
        yields = carried_values.yields(list(terminator.operands))
        lowering.create("scf.yield", (), yields)
    lowering.builder.loc = op.location

    def loop() -> list[ir.Value]:
        initial = carried_values.initial(sums, zeros)
        made = lowering.create(
            "scf.for",
            [v.type for v in initial],
            [*bounds, *initial],
            {"loop_annotation": attribute(_annotation(op))},
            regions=1,
        )
        block.append_to(made.regions[0])
        return list(made.results)

    if sums:
        types = [argument.type for argument in list(block.arguments)[1:]]
        runs = lowering.compare("slt", bounds[0], bounds[1])
        results = lowering.branch(runs, types, loop, carried_values.initial)
    else:
        results = loop()
    holder.erase()
    carried_values.finish(op, used, results)


def _sums_from_zero(lowering: Lowering, op: ir.Operation) -> list[int]:
    """The iter args that are zero at first and that only a warpgroup_dot of the body adds to."""
    found = []
    body = op.regions[0].blocks[0]
    for index, init in enumerate(list(op.operands)[3:]):
        uses = list(body.arguments[1 + index].uses)
        if len(uses) != 1 or uses[0].operand_number != ACCUMULATOR:
            continue
        user = uses[0].owner.operation
        if user.name == "mt.warpgroup_dot" and user.block == body:
            zero = lowering.zero(carried(init.type.element_type))
            if all(value == zero for value in lowering.held(init)):
                found.append(index)
    return found


def _zeros_in_flight(lowering: Lowering, op: ir.Operation, sums: Sequence[int]) -> list[int]:
    """The other iter args that are zero at first and that products in flight make the next of."""
    body = op.regions[0].blocks[0]
    found = []
    for index, value in enumerate(list(body.operations)[-1].operation.operands):
        if isinstance(value, ir.BlockArgument) or index in sums:
            continue
        init = op.operands[3 + index]
        if value.owner.name == "mt.warpgroup_dot" and "mt.in_flight" in value.owner.attributes:
            zero = lowering.zero(carried(init.type.element_type))
            if all(register == zero for register in lowering.held(init)):
                found.append(index)
    return found


def _in_words(loop: ir.Operation) -> list[int]:
    """The iter args of f16 whose next value is made by tensor cores, here or in an inner loop."""
    yielded = list(loop.regions[0].blocks[0].operations)[-1].operation.operands
    return [index for index, value in enumerate(yielded) if _is_made_in_words(value)]


def _is_made_in_words(value: ir.Value) -> bool:
    if isinstance(value, ir.BlockArgument) or not isinstance(element_of(value.type), ir.F16Type):
        return False
    maker = value.owner
    if maker.name == "scf.for":
        return ir.OpResult(value).result_number in _in_words(maker)
    if maker.name == "mt.dot":
        return "mt.fma" not in maker.attributes
    return maker.name in ("mt.warpgroup_dot", "mt.warpgroup_result")


def _is_used(value: ir.Value) -> bool:
    return next(iter(value.uses), None) is not None


def _annotation(op: ir.Operation) -> str:
    """Loops stay rolled unless the kernel asks: LLVM would copy the main loop up to four times."""
    if "mt.unroll" in op.attributes:
        count = ir.IntegerAttr(op.attributes["mt.unroll"]).value
        if count > 1:
            return f"#llvm.loop_annotation<unroll = <count = {count} : i32>>"
    return NO_UNROLL


def _flat_types(types: Sequence[ir.Type]) -> list[ir.Type]:
    """One carried type per register of values of tile-IR types."""
    flat: list[ir.Type] = []
    for type_ in types:
        if isinstance(type_, ir.RankedTensorType):
            flat += [carried(type_.element_type)] * len(layout_of(type_).registers)
        else:
            flat.append(carried(type_))
    return flat


def _flat_values(lowering: Lowering, values: Sequence[ir.Value]) -> list[ir.Value]:
    return [register for value in values for register in lowering.held(value)]


def _bind(lowering: Lowering, values: Sequence[ir.Value], flat: Sequence[ir.Value]) -> None:
    """Records flat registers as the lowered form of tile-IR values."""
    position = 0
    for value in values:
        type_ = value.type
        count = len(layout_of(type_).registers) if isinstance(type_, ir.RankedTensorType) else 1
        lowering.set_registers(value, list(flat[position : position + count]))
        position += count


def _if(lowering: Lowering, op: ir.Operation) -> None:
    condition = lowering.scalar(op.operands[0])
    used = [index for index, result in enumerate(op.results) if _is_used(result)]
    types = _flat_types([op.results[i].type for i in used])
    created = lowering.create("scf.if", types, [condition], regions=2)
    for source, target in zip(op.regions, created.regions, strict=True):
        if not len(source.blocks):
            continue
        block = target.blocks.append()
        with lowering.builder.at(ir.InsertionPoint(block)):
            terminator = lowering.lower_block(source.blocks[0])
            values = [terminator.operands[i] for i in used]
            lowering.create("scf.yield", (), _flat_values(lowering, values))
    _bind(lowering, [op.results[i] for i in used], list(created.results))


def _while(lowering: Lowering, op: ir.Operation) -> None:
    initial = _flat_values(lowering, list(op.operands))
    created = lowering.create(
        "scf.while", _flat_types([r.type for r in op.results]), initial, regions=2
    )
    for source_region, target in zip(op.regions, created.regions, strict=True):
        source = source_region.blocks[0]
        parameters = list(source.arguments)
        types = _flat_types([p.type for p in parameters])
        block = target.blocks.append(*types, arg_locs=[op.location] * len(types))
        _bind(lowering, parameters, list(block.arguments))
        with lowering.builder.at(ir.InsertionPoint(block)):
            terminator = lowering.lower_block(source)
            # scf.condition or scf.yield, with the same operands flattened
            lowering.create(terminator.name, (), _flat_values(lowering, list(terminator.operands)))
    _bind(lowering, list(op.results), list(created.results))


RULES = {"scf.for": _for, "scf.if": _if, "scf.while": _while}
