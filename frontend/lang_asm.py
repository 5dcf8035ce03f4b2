"""Inline PTX on elements: tl.inline_asm_elementwise."""

from __future__ import annotations

from typing import Any

from minitriton.frontend import arithmetic, constants
from minitriton.frontend.active import builtin, emitter
from minitriton.frontend.casting import to_tensor
from minitriton.frontend.errors import NotConstexpr, kind_of
from minitriton.frontend.errors_elementwise import (
    AsmConstraints,
    AsmOperand,
    AsmPack,
    NoResults,
    PackSize,
    TooManyValues,
)
from minitriton.frontend.values import unwrap
from minitriton.ir.asm_operands import (
    LETTER_BITS,
    Constraints,
    fits,
    parse_constraints,
    registers_of,
    unknown_operand,
)
from minitriton.ir.dtypes import AnyType, block_type

MAX_VALUES = 16  # operands, or results, of one op


@builtin
def inline_asm_elementwise(
    asm: Any, constraints: Any, args: Any, dtype: Any, is_pure: Any, pack: Any
) -> Any:
    """The PTX `asm` run on `pack` elements of each of `args` at a time; a value of type `dtype`
    for each element, or a tuple of them for a tuple of types.

    `args` are broadcast together. The text names registers $0, $1, ...: those of the results, then
    those of the arguments, as in `constraints`, such as "=r,r,f". Elements narrower than 32 bits
    share registers. `is_pure` promises that results depend on the arguments only and that nothing
    else happens; without it the text stays where it is. Which elements come together is undefined.
    """
    e = emitter()
    text, letters = _text(asm, "asm"), _text(constraints, "constraints")
    together, pure = constants.integer(pack, "pack"), constants.flag(is_pure, "is_pure")
    if together < 1:
        raise PackSize("pack", together).about("pack")
    operands = arithmetic.broadcast(e, *(to_tensor(e, arg, "args") for arg in _items(args, "args")))
    several = isinstance(unwrap(dtype), tuple | list)
    elements = [
        constants.element_type(t) for t in (_items(dtype, "dtype") if several else (dtype,))
    ]
    if not elements:
        raise NoResults("tl.inline_asm_elementwise").about("dtype")
    if max(len(elements), len(operands)) > MAX_VALUES:
        raise TooManyValues("tl.inline_asm_elementwise", MAX_VALUES).about("args")
    _check(text, letters, elements, [v.dtype for v in operands], together)
    shape = operands[0].shape if operands else ()
    types: list[AnyType] = [block_type(t, shape) if shape else t for t in elements]
    attributes = {"asm": e.string(text), "constraints": e.string(letters), "pack": e.i32(together)}
    name = "mt.elementwise_asm" if pure else "mt.effectful_asm"
    _, results = e.multi(name, types, operands, attributes)
    return tuple(results) if several else results[0]


def _text(value: Any, what: str) -> str:
    plain = unwrap(value)
    if not isinstance(plain, str):
        raise NotConstexpr(what, kind_of(plain), "a string").about(what)
    return plain


def _items(value: Any, what: str) -> tuple[Any, ...]:
    plain = unwrap(value)
    if not isinstance(plain, tuple | list):
        raise NotConstexpr(what, kind_of(plain), "a list or a tuple").about(what)
    return tuple(plain)


def _check(text: str, constraints: str, results: list[Any], operands: list[Any], pack: int) -> None:
    """Mistakes in the text's operands, which LLVM would answer by ending the process."""
    try:
        needed = [registers_of([t.bits for t in types], pack) for types in (results, operands)]
    except ValueError as problem:
        raise AsmPack(str(problem)).about("pack") from None
    usual = ["=" + letter for letter in _usual(results, pack)] + _usual(operands, pack)
    try:
        found = parse_constraints(constraints)
        _check_registers(found, needed)
    except ValueError as problem:
        raise AsmConstraints(constraints, str(problem), ",".join(usual)).about(
            "constraints"
        ) from None
    count = len(found.results) + len(found.operands)
    unknown = unknown_operand(text, count)
    if unknown is not None:
        raise AsmOperand(unknown, f"$0 to ${count - 1}").about("asm")


def _check_registers(found: Constraints, needed: list[list[int]]) -> None:
    for kind, letters, widths in (
        ("results", found.results, needed[0]),
        ("arguments", found.operands, needed[1]),
    ):
        if len(letters) != len(widths):
            raise ValueError(f"{len(letters)} for {kind} that take {len(widths)} registers")
        for letter, bits in zip(letters, widths, strict=True):
            if not fits(letter, bits):
                raise ValueError(
                    f"{letter!r} is a register of {LETTER_BITS[letter]} bits, for {bits} of them"
                )


def _usual(types: list[Any], pack: int) -> list[str]:
    """The letters that one would use for the registers of some elements."""
    return [
        _letter(bits, floating=t.bits == bits and not t.is_ptr() and t.is_floating())
        for t in types
        for bits in registers_of([t.bits], pack)
    ]


def _letter(bits: int, *, floating: bool) -> str:
    if bits == 64:
        return "d" if floating else "l"
    if bits == 32:
        return "f" if floating else "r"
    return "h" if bits == 16 else "r"
