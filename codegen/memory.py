"""mt.load and mt.store on global memory.

Unmasked accesses without modifiers are LLVM loads and stores, which LLVM may merge and hoist.
The others are predicated inline PTX without branches: a masked load writes over registers that
already hold `other`. All inline accesses clobber memory, else LLVM would reorder around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minitriton.codegen.access import plan_access
from minitriton.codegen.emit import width_of
from minitriton.codegen.tile import carried
from minitriton.ir.dialect import element_of
from minitriton.ir.encoding import layout_of
from minitriton.ir.mlir import ir

if TYPE_CHECKING:
    from minitriton.codegen.lower import Lowering

LETTERS = {16: "h", 32: "r", 64: "l"}


@dataclass(frozen=True)
class Hints:
    """PTX suffixes of an access from `.volatile/.global` on, "" for a plain one, and what L2 does
    with its lines (i64) where that is not the usual."""

    suffixes: str = ""
    policy: ir.Value | None = None

    @property
    def operand(self) -> list[ir.Value]:
        """Of the instruction, after all others; its register is an "l"."""
        return [] if self.policy is None else [self.policy]

    def listed(self, number: int) -> str:
        """The operand in the instruction's text, as its `number`."""
        return "" if self.policy is None else f", ${number}"


def _load(lowering: Lowering, op: ir.Operation) -> None:
    result = op.results[0]
    element = carried(element_of(result.type))
    extras = [lowering.registers(v) for v in list(op.operands)[1:]]
    hints = load_hints(lowering, op)
    pointers = lowering.registers(op.operands[0])
    if not isinstance(result.type, ir.RankedTensorType):
        mask = extras[0][0] if extras else None
        other = [extras[1][0]] if len(extras) > 1 else None
        (value,) = _load_vector(lowering, element, 1, pointers[0], 0, mask, other, hints)
        lowering.set(result, value)
        return
    layout = layout_of(result.type)
    plan = plan_access(lowering, op, element)
    registers: list[ir.Value | None] = [None] * layout.num_registers
    for access in plan.accesses:
        head = access.registers[0]
        mask = extras[0][head] if extras else None
        other = [extras[1][r] for r in access.registers] if len(extras) > 1 else None
        values = _load_vector(
            lowering, element, len(access.registers), pointers[access.base], access.offset,
            mask, other, hints,
        )  # fmt: skip
        for register, value in zip(access.registers, values, strict=True):
            registers[register] = value
    for register, owner in plan.duplicates:
        registers[register] = registers[owner]
    lowering.set_registers(result, [value for value in registers if value is not None])


def _load_vector(
    lowering: Lowering,
    element: ir.Type,
    count: int,
    pointer: ir.Value,
    offset: int,
    mask: ir.Value | None,
    other: Sequence[ir.Value] | None,
    hints: Hints,
) -> list[ir.Value]:
    """`count` consecutive elements; lanes with a false mask get `other`, or zeros."""
    size = count * max(width_of(element) // 8, 1)
    if mask is None and not hints.suffixes:
        place = lowering.offset_pointer(pointer, offset)
        if width_of(element) == 8 and size > 1:  # as words: LLVM would load byte by byte
            word = word_type(lowering, element, size)
            loaded = _load_plain(lowering, word, max(size // 4, 1), place, size)
            return from_words(lowering, loaded, element, count)
        return _load_plain(lowering, element, count, place, size)
    word = word_type(lowering, element, size)
    words = max(size * 8 // word.width, 1)
    if mask is None:
        initial = []
    elif other is None:
        initial = [lowering.zero(word)] * words
    else:
        initial = to_words(lowering, other, word)
    place, operands = words + len(initial), [*initial, pointer, *hints.operand]
    text = f"ld{hints.suffixes or '.global'}{vector_suffix(words)}.b{min(word.width, 8 * size)} "
    text += f"{operand_list(range(words))}, [${place}+{offset}]{hints.listed(place + 1)};"
    constraints = [f"={LETTERS[word.width]}"] * words + [str(i) for i in range(len(initial))]
    constraints += ["l"] * (1 + len(hints.operand))
    if mask is not None:
        text = f"@${words + len(operands)} {text}"
        constraints.append("b")
        operands.append(mask)
    values = lowering.asm(text, ",".join([*constraints, "~{memory}"]), [word] * words, operands)
    return from_words(lowering, values, element, count)


def _load_plain(
    lowering: Lowering, element: ir.Type, count: int, pointer: ir.Value, size: int
) -> list[ir.Value]:
    type_ = element if count == 1 else ir.VectorType.get([count], element)
    loaded = lowering.load(type_, pointer, size)
    return [loaded] if count == 1 else lowering.unpack(loaded)


def _store(lowering: Lowering, op: ir.Operation) -> None:
    value = op.operands[1]
    extras = list(op.operands)[2:]
    pointers = lowering.registers(op.operands[0])
    hints = store_hints(lowering, op)
    masks = lowering.registers(extras[0]) if extras else None
    if not isinstance(value.type, ir.RankedTensorType):
        mask = both(lowering, masks[0] if masks else None, lowering.is_first_thread)
        scalar = lowering.scalar(value)
        _store_vector(lowering, [scalar], pointers[0], 0, mask, hints)
        return
    tile = lowering.tile(value)
    owner = lowering.owns_elements(tile.layout)
    for access in plan_access(lowering, op, tile.element).accesses:
        mask = both(lowering, masks[access.registers[0]] if masks else None, owner)
        values = [tile.registers[r] for r in access.registers]
        _store_vector(lowering, values, pointers[access.base], access.offset, mask, hints)


def _store_vector(
    lowering: Lowering,
    values: Sequence[ir.Value],
    pointer: ir.Value,
    offset: int,
    mask: ir.Value | None,
    hints: Hints,
) -> None:
    element = values[0].type
    size = len(values) * max(width_of(element) // 8, 1)
    if mask is None and not hints.suffixes:
        if width_of(element) == 8 and size > 1:
            values = to_words(lowering, values, word_type(lowering, element, size))
        vector = values[0] if len(values) == 1 else lowering.pack(values)
        lowering.store(vector, lowering.offset_pointer(pointer, offset), size)
        return
    word = word_type(lowering, element, size)
    words = to_words(lowering, values, word)
    count = len(words)
    text = f"st{hints.suffixes or '.global'}{vector_suffix(count)}.b{min(word.width, 8 * size)} "
    text += f"[${count}+{offset}], {operand_list(range(count))}{hints.listed(count + 1)};"
    operands = [*words, pointer, *hints.operand]
    constraints = ",".join([LETTERS[word.width]] * count) + ",l" * (1 + len(hints.operand))
    if mask is not None:
        text, constraints = f"@${len(operands)} {text}", constraints + ",b"
        operands.append(mask)
    lowering.asm(text, constraints + ",~{memory}", [], operands)


def both(lowering: Lowering, lhs: ir.Value | None, rhs: ir.Value | None) -> ir.Value | None:
    """Conjunction of two optional predicates; None is always true."""
    if lhs is None or rhs is None:
        return lhs if rhs is None else rhs
    return lowering.and_(lhs, rhs)


# Registers of inline PTX: 16, 32 or 64 bits wide, whatever the elements


def word_type(lowering: Lowering, element: ir.Type, size: int) -> ir.IntegerType:
    """The register type that moves `size` bytes of elements."""
    if width_of(element) == 64:
        return lowering.i64
    return lowering.i32 if size >= 4 else lowering.i16


def to_words(
    lowering: Lowering, values: Sequence[ir.Value], word: ir.IntegerType
) -> list[ir.Value]:
    """Elements in memory order packed into registers of `word`'s width."""
    width = width_of(values[0].type)
    if values[0].type == lowering.pointer:
        return [lowering.op("llvm.ptrtoint", word, (v,)) for v in values]
    if width == 8 and len(values) == 1:
        return [lowering.op("arith.extui", word, (values[0],))]
    per_word = word.width // width
    return [
        lowering.join_bits(values[i : i + per_word], word) for i in range(0, len(values), per_word)
    ]


def from_words(
    lowering: Lowering, words: Sequence[ir.Value], element: ir.Type, count: int
) -> list[ir.Value]:
    """The inverse of `to_words`."""
    width = width_of(element)
    if element == lowering.pointer:
        return [lowering.op("llvm.inttoptr", element, (w,)) for w in words]
    if width == 8 and count == 1:
        return [lowering.op("arith.trunci", element, (words[0],))]
    per_word = width_of(words[0].type) // width
    return [v for word in words for v in lowering.split_bits(word, element, per_word)]


def vector_suffix(words: int) -> str:
    """`.v4` and the like; nothing for one."""
    return f".v{words}" if words > 1 else ""


def operand_list(indices: Sequence[int]) -> str:
    """`$0` or `{$0, $1}` in inline PTX."""
    listed = ", ".join(f"${i}" for i in indices)
    return listed if len(indices) == 1 else "{" + listed + "}"


def _text(op: ir.Operation, name: str) -> str:
    return ir.StringAttr(op.attributes[name]).value if name in op.attributes else ""


def load_hints(lowering: Lowering, op: ir.Operation) -> Hints:
    """What the attributes of a load ask for."""
    if "volatile" in op.attributes:
        return Hints(".volatile.global")
    return store_hints(lowering, op)


def store_hints(lowering: Lowering, op: ir.Operation) -> Hints:
    """The same for a store."""
    cache, evict = _text(op, "cache"), _text(op, "evict")
    if cache:  # PTX takes a cache operator or an eviction priority, not both
        return Hints(f".global.{cache}")
    if not evict:
        return Hints()
    text = f"createpolicy.fractional.L2::{evict}.b64 $0, 1.0;"
    policy = lowering.once(
        ("L2 policy", evict), lambda: lowering.asm(text, "=l", [lowering.i64], effects=False)[0]
    )
    return Hints(f".global.L1::{evict}.L2::cache_hint", policy)


RULES = {"mt.load": _load, "mt.store": _store}
