"""Code of a kernel's author on elements: inline PTX, and functions of scalars.

A thread's elements are taken in groups of `pack`, those that several of its registers repeat once;
where they are fewer, the last one fills the group up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from minitriton.codegen.emit import width_of
from minitriton.codegen.lower import integer_attribute
from minitriton.codegen.tile import carried
from minitriton.ir.asm_operands import MARK, elements_per_register, parse_constraints
from minitriton.ir.dialect import element_of
from minitriton.ir.encoding import layout_of
from minitriton.ir.mlir import ir

if TYPE_CHECKING:
    from minitriton.codegen.lower import Lowering

Group = list[list[ir.Value]]  # per operand or result its elements, of one group


def _asm(lowering: Lowering, op: ir.Operation) -> None:
    pack = integer_attribute(op, "pack")
    text = ir.StringAttr(op.attributes["asm"]).value
    constraints = ir.StringAttr(op.attributes["constraints"]).value
    letters = parse_constraints(constraints)
    effects = op.name == "mt.effectful_asm"
    if effects and "~{memory}" not in constraints:
        constraints += ",~{memory}"
    elements = [carried(element_of(result.type)) for result in op.results]

    def run(group: Group) -> Group:
        operands = [
            register
            for values in group
            for register in _joined(lowering, values, elements_per_register(_bits(values[0]), pack))
        ]
        taken = [
            _to_letter(lowering, value, letter)
            for value, letter in zip(operands, letters.operands, strict=True)
        ]
        each = [elements_per_register(width_of(element), pack) for element in elements]
        places = [
            (element, count)
            for element, count in zip(elements, each, strict=True)
            for _ in range(pack // count)
        ]
        types = [
            _letter_type(lowering, letter, element)
            for letter, (element, _) in zip(letters.results, places, strict=True)
        ]
        given = lowering.asm(f"{MARK} {text}", constraints, types, taken, effects=effects)
        values = [
            value
            for register, (element, count) in zip(given, places, strict=True)
            for value in _from_register(lowering, register, element, count)
        ]
        return [values[i : i + pack] for i in range(0, len(values), pack)]

    in_groups(lowering, op, pack, run)


def _map(lowering: Lowering, op: ir.Operation) -> None:
    pack = integer_attribute(op, "pack")
    block = op.regions[0].blocks[0]

    def run(group: Group) -> Group:
        yielded = lowering.inline(block, [value for values in group for value in values])
        values = [value for value in yielded if isinstance(value, ir.Value)]
        return [values[i : i + pack] for i in range(0, len(values), pack)]

    in_groups(lowering, op, pack, run)


def in_groups(
    lowering: Lowering, op: ir.Operation, pack: int, run: Callable[[Group], Group]
) -> None:
    """Results of `op`, whose tiles have one layout: what `run` makes of each group."""
    first = op.results[0]
    registers: list[int] = [0]
    repeated = 0
    if isinstance(first.type, ir.RankedTensorType):
        layout = layout_of(first.type)
        registers, repeated = list(layout.registers), layout.free_bits("register")
    own = [register for register in registers if not register & repeated]
    operands = [lowering.registers(value) for value in op.operands]
    found: list[dict[int, ir.Value]] = [{} for _ in op.results]
    for start in range(0, len(own), pack):
        places = own[start : start + pack]
        filled = places + places[-1:] * (pack - len(places))
        results = run([[source[register] for register in filled] for source in operands])
        for known, values in zip(found, results, strict=True):
            known.update(zip(places, values, strict=False))
    for result, known in zip(op.results, found, strict=True):
        lowering.set_registers(result, [known[register & ~repeated] for register in registers])


# Elements in registers of inline PTX


def _bits(value: ir.Value) -> int:
    return width_of(value.type)


def _integer(bits: int) -> ir.Type:
    return ir.IntegerType.get_signless(bits)


def _joined(lowering: Lowering, values: Sequence[ir.Value], each: int) -> list[ir.Value]:
    """Registers of `each` elements."""
    if each == 1:
        return list(values)
    type_ = _integer(each * _bits(values[0]))
    return [lowering.join_bits(values[i : i + each], type_) for i in range(0, len(values), each)]


def _to_letter(lowering: Lowering, value: ir.Value, letter: str) -> ir.Value:
    """A value as the type that inline PTX has for a letter; zeros above its bits."""
    type_ = _letter_type(lowering, letter, value.type)
    if value.type == lowering.pointer:
        return value
    bits = _bits(value)
    if bits == width_of(type_):
        return lowering.bitcast(value, type_)
    return lowering.op("arith.extui", type_, (lowering.bitcast(value, _integer(bits)),))


def _letter_type(lowering: Lowering, letter: str, element: ir.Type) -> ir.Type:
    if element == lowering.pointer:
        return element
    return {
        "b": lowering.i1, "h": lowering.i16, "r": lowering.i32, "l": lowering.i64,
        "f": lowering.f32, "d": lowering.f64,
    }[letter]  # fmt: skip


def _from_register(
    lowering: Lowering, register: ir.Value, element: ir.Type, count: int
) -> list[ir.Value]:
    """The `count` elements in the low bits of a register."""
    if element == lowering.pointer:
        return [register]
    bits = width_of(element) * count
    if bits < _bits(register):
        register = lowering.op("arith.trunci", _integer(bits), (register,))
    return lowering.split_bits(register, element, count)


RULES = {"mt.elementwise_asm": _asm, "mt.effectful_asm": _asm, "mt.map_elementwise": _map}
