"""mt.atomic_rmw and mt.atomic_cas on global memory, as inline PTX.

One thread acts for each element: thread 0 for a scalar, the owner for elements that several
threads hold. The others get the old value through the shared memory allocated to the op, if it is
used at all; without a use `red` replaces `atom`. A scalar atomic with release or acquire semantics
acts for the whole CTA, so the threads meet before or after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minitriton.codegen.access import plan_access
from minitriton.codegen.elementwise import is_float
from minitriton.codegen.emit import width_of
from minitriton.codegen.memory import LETTERS, both, from_words, to_words
from minitriton.codegen.shared_address import shared_word
from minitriton.codegen.tile import Tile
from minitriton.ir.diagnostics import InternalError
from minitriton.ir.encoding import layout_of
from minitriton.ir.mlir import ir

if TYPE_CHECKING:
    from minitriton.codegen.lower import Lowering

PACKED_BYTES = 4  # two 16-bit floats added by one instruction
INTEGER_OPS = {
    "add": ("add", "u"), "max": ("max", "s"), "min": ("min", "s"), "umax": ("max", "u"),
    "umin": ("min", "u"), "and": ("and", "b"), "or": ("or", "b"), "xor": ("xor", "b"),
    "xchg": ("exch", "b"),
}  # fmt: skip


@dataclass(frozen=True)
class _Order:
    """Memory order and scope as PTX spells them."""

    sem: str
    scope: str

    @staticmethod
    def of(op: ir.Operation) -> _Order:
        sem, scope = (ir.StringAttr(op.attributes[name]).value for name in ("sem", "scope"))
        return _Order(sem, {"gpu": "gpu", "cta": "cta", "sys": "sys"}[scope])

    @property
    def releases(self) -> bool:
        return self.sem in ("release", "acq_rel")

    @property
    def acquires(self) -> bool:
        return self.sem in ("acquire", "acq_rel")


# (pointer, offset, values, mask) -> old values; one PTX instruction or loop
Act = Callable[[ir.Value, int, list[list[ir.Value]], "ir.Value | None"], "list[ir.Value]"]


def _rmw(lowering: Lowering, op: ir.Operation) -> None:
    kind = ir.StringAttr(op.attributes["kind"]).value
    order, used = _Order.of(op), _is_used(op)
    element = lowering.registers(op.operands[1])[0].type
    instruction = _instruction(lowering, kind, element)
    packable = kind == "fadd" and instruction is not None and width_of(element) == 16

    def act(
        pointer: ir.Value, offset: int, values: list[list[ir.Value]], mask: ir.Value | None
    ) -> list[ir.Value]:
        if instruction is None:
            return [_rmw_by_cas(lowering, kind, order, pointer, offset, values[0][0], mask)]
        name = instruction + "x2" if len(values[0]) == 2 else instruction
        return _atom(lowering, name, order, pointer, offset, values, mask, used)

    extras = list(op.operands)[2:]
    mask = lowering.registers(extras[0]) if extras else None
    width = PACKED_BYTES if packable else width_of(element) // 8
    _perform(lowering, op, [op.operands[1]], mask, order, width, act)


def _cas(lowering: Lowering, op: ir.Operation) -> None:
    order, used = _Order.of(op), _is_used(op)
    width = width_of(lowering.registers(op.operands[1])[0].type)

    def act(
        pointer: ir.Value, offset: int, values: list[list[ir.Value]], mask: ir.Value | None
    ) -> list[ir.Value]:
        return _atom(lowering, f"cas.b{width}", order, pointer, offset, values, mask, used)

    _perform(lowering, op, list(op.operands)[1:3], None, order, width // 8, act)


def _instruction(lowering: Lowering, kind: str, element: ir.Type) -> str | None:
    """Operation and type suffix; None where only a compare-and-swap loop does it."""
    width = width_of(element)
    if kind == "fadd":
        if element == lowering.bf16 and not lowering.target.has("atom_bf16"):
            return None
        noftz = ".noftz" if width == 16 else ""
        return f"add{noftz}.{element}"
    if kind not in INTEGER_OPS:
        raise InternalError("codegen", f"unknown atomic operation {kind!r}")
    name, letter = INTEGER_OPS[kind]
    return f"{name}.{letter}{width}" if width >= 32 else None


def _perform(
    lowering: Lowering,
    op: ir.Operation,
    operands: Sequence[ir.Value],
    mask: Sequence[ir.Value] | None,
    order: _Order,
    max_bytes: int,
    act: Act,
) -> None:
    """Runs `act` once per element (or packed pair) and spreads the old values."""
    pointers = lowering.registers(op.operands[0])
    values = [lowering.registers(v) for v in operands]
    result, used = op.results[0], _is_used(op)
    if not isinstance(result.type, ir.RankedTensorType):
        if order.releases:
            lowering.meet()
        own = both(lowering, mask[0] if mask else None, lowering.is_first_thread)
        (old,) = act(pointers[0], 0, [[v[0]] for v in values], own)
        if used:
            old = _broadcast_scalar(lowering, op, old)
        elif order.acquires:
            lowering.barrier()
        lowering.set(result, old)
        return
    layout = layout_of(result.type)
    element = values[0][0].type
    owner = lowering.owns_elements(layout)
    plan = plan_access(lowering, op, element, max_bytes)
    registers: list[ir.Value] = [values[0][0]] * layout.num_registers
    for access in plan.accesses:
        own = both(lowering, mask[access.registers[0]] if mask else None, owner)
        group = [[v[r] for r in access.registers] for v in values]
        old_values = act(pointers[access.base], access.offset, group, own)
        for register, old in zip(access.registers, old_values, strict=True):
            registers[register] = old
    for register, source in plan.duplicates:
        registers[register] = registers[source]
    tile = Tile(layout, element, registers)
    if used and owner is not None:
        _broadcast_tile(lowering, op, tile, owner)
    lowering.set(result, tile)


def _is_used(op: ir.Operation) -> bool:
    return next(iter(op.results[0].uses), None) is not None


def _atom(
    lowering: Lowering,
    instruction: str,
    order: _Order,
    pointer: ir.Value,
    offset: int,
    operands: list[list[ir.Value]],
    mask: ir.Value | None,
    used: bool,
) -> list[ir.Value]:
    """One atom or red; masked-off threads get zeros."""
    element, count = operands[0][0].type, len(operands[0])
    word = ir.IntegerType.get_signless(width_of(element) * count)
    words = [to_words(lowering, values, word)[0] for values in operands]
    letter, types = LETTERS[word.width], "word"
    if count == 1 and is_float(element) and instruction.startswith("add") and word.width > 16:
        # PTX checks register types here: f32 and f64 go in float registers
        letter, types = ("f" if word.width == 32 else "d"), "float"
        words = [values[0] for values in operands]
    register = element if types == "float" else word
    simple = not used and not order.acquires and not instruction.startswith(("exch", "cas"))
    name = f"{'red' if simple else 'atom'}.{order.sem}.{order.scope}.global.{instruction}"
    outputs = 0 if simple else 1
    tied = 0 if simple or mask is None else 1
    first = outputs + tied
    listed = "".join(f", ${first + 1 + i}" for i in range(len(words)))
    target = "" if simple else "$0, "
    text = f"{name} {target}[${first}+{offset}]{listed};"
    constraints = [f"={letter}"] * outputs + ["0"] * tied + ["l"] + [letter] * len(words)
    arguments = [lowering.zero(register)] * tied + [pointer, *words]
    if mask is not None:
        text = f"@${first + 1 + len(words)} {text}"
        constraints.append("b")
        arguments.append(mask)
    results = lowering.asm(
        text, ",".join([*constraints, "~{memory}"]), [register] * outputs, arguments
    )
    if simple:
        return [lowering.zero(element)] * count
    if types == "float":
        return results
    return from_words(lowering, results, element, count)


def _rmw_by_cas(
    lowering: Lowering,
    kind: str,
    order: _Order,
    pointer: ir.Value,
    offset: int,
    value: ir.Value,
    mask: ir.Value | None,
) -> ir.Value:
    """A 16-bit operation that the target lacks, as a loop around atom.cas.b16."""
    element, bits = value.type, lowering.i16
    if width_of(element) != 16:
        raise InternalError("codegen", f"no atomic {kind} on {element}")

    def changed(old: ir.Value) -> ir.Value:
        if kind == "xchg":
            return lowering.bitcast(value, bits)
        if kind == "fadd":
            total = lowering.binary("addf", lowering.bitcast(old, element), value)
            return lowering.bitcast(total, bits)
        raise InternalError("codegen", f"no atomic {kind} on {element}")

    def loop() -> list[ir.Value]:
        (first,) = lowering.asm(
            f"ld.relaxed.{order.scope}.global.b16 $0, [$1+{offset}];",
            "=h,l,~{memory}", [bits], [pointer],
        )  # fmt: skip
        created = lowering.create("scf.while", [bits], [first], regions=2)
        before, after = (
            region.blocks.append(bits, arg_locs=[lowering.builder.loc])
            for region in created.regions
        )
        with lowering.builder.at(ir.InsertionPoint(before)):
            expected = before.arguments[0]
            group = [[expected], [changed(expected)]]
            (found,) = _atom(lowering, "cas.b16", order, pointer, offset, group, None, True)
            again = lowering.compare("ne", found, expected)
            lowering.create("scf.condition", (), [again, found])
        with lowering.builder.at(ir.InsertionPoint(after)):
            lowering.create("scf.yield", (), [after.arguments[0]])
        return list(created.results)

    if mask is None:
        (old,) = loop()
    else:
        (old,) = lowering.branch(mask, [bits], loop, lambda: [lowering.zero(bits)])
    return lowering.bitcast(old, element)


# Old values to the threads that did not act


def _broadcast_scalar(lowering: Lowering, op: ir.Operation, old: ir.Value) -> ir.Value:
    place = lowering.scratch(op)
    _store_shared(lowering, old, place, lowering.is_first_thread)
    lowering.barrier()
    return lowering.load(old.type, place, width_of(old.type) // 8)


def _broadcast_tile(lowering: Lowering, op: ir.Operation, tile: Tile, owner: ir.Value) -> None:
    """Owners write their elements in C order, all read theirs back; fills `tile` anew."""
    layout, size = tile.layout, width_of(tile.element) // 8
    terms = ((lowering.lane_id, layout.flat("lane")), (lowering.warp_id, layout.flat("warp")))
    thread = lowering.once(("flat", layout), lambda: lowering.linear(terms))
    base = lowering.scratch(op)
    places = []
    for register in layout.registers:
        value = tile.registers[register]
        index = lowering.xor(thread, layout.apply_flat(register=register))
        places.append(lowering.offset_pointer(base, index, tile.element))
        _store_shared(lowering, value, places[-1], owner)
    lowering.barrier()
    registers = list(tile.registers)
    for register, place in zip(layout.registers, places, strict=True):
        registers[register] = lowering.load(tile.element, place, size)
    tile.registers = registers


def _store_shared(
    lowering: Lowering, value: ir.Value, place: ir.Value, predicate: ir.Value
) -> None:
    """A predicated store: a branch here could split the warp in front of the barrier."""
    word = ir.IntegerType.get_signless(width_of(value.type))
    (bits,) = to_words(lowering, [value], word)
    address = shared_word(lowering, place)
    lowering.asm(
        f"@$2 st.shared.b{word.width} [$1], $0;",
        f"{LETTERS[word.width]},r,b,~{{memory}}",
        [],
        [bits, address, predicate],
    )


RULES = {"mt.atomic_rmw": _rmw, "mt.atomic_cas": _cas}
