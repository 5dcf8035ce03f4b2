"""How the operands of inline PTX written by a kernel's author lie in registers.

One instance of the text processes `pack` elements of every operand. Elements narrower than 32 bits
share a register, the first in the lowest bits. Constraint letters: b predicate, h 16 bits, r 32,
l 64 (or a pointer), f fp32, d fp64; "=" marks results, "&" those written before all operands are
read, a digit an operand in the register of that result, "~{...}" what the text changes besides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

LETTER_BITS = {"b": 1, "h": 16, "r": 32, "l": 64, "f": 32, "d": 64}
MARK = "/* tl.inline_asm_elementwise */"  # tells these texts from the compiler's own in the PTX
_REGISTER_BITS = 32
_DOLLAR = re.compile(r"\$(?:\$|(\d+)|\{(\d+)(?::\w)?\}|\{:uid\}|(.?))", re.S)


@dataclass(frozen=True)
class Constraints:
    """Letters of results and operands, in order; a tied operand has its result's letter."""

    results: tuple[str, ...]
    operands: tuple[str, ...]


def parse_constraints(text: str) -> Constraints:
    """What a constraint string says; ValueError with the reason where it is none."""
    results: list[str] = []
    operands: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        if re.fullmatch(r"~\{\w+\}", part):
            continue
        if part.startswith("="):
            if operands:
                raise ValueError("results ('=') come before operands")
            results.append(_letter(part, part[1:].removeprefix("&")))
        elif part.isdigit():
            if int(part) >= len(results):
                raise ValueError(f"there is no result {part}")
            operands.append(results[int(part)])
        else:
            operands.append(_letter(part, part))
    return Constraints(tuple(results), tuple(operands))


def _letter(part: str, letter: str) -> str:
    if letter not in LETTER_BITS:
        raise ValueError(f"{part!r} is no letter b h r l f d, with = before those of results")
    return letter


def elements_per_register(bits: int, pack: int) -> int:
    """How many elements of `bits` bits (1 for truth values) share one register."""
    return min(_REGISTER_BITS // bits, pack) if 1 < bits < _REGISTER_BITS else 1


def registers_of(bits: Sequence[int], pack: int) -> list[int]:
    """Bits of each register that values of these widths take, in order; ValueError where `pack`
    elements do not fill their registers."""
    found = []
    for width in bits:
        each = elements_per_register(width, pack)
        if pack % each:
            raise ValueError(f"pack={pack} elements of {width} bits do not fill registers of 32")
        found += [width * each] * (pack // each)
    return found


def fits(letter: str, bits: int) -> bool:
    """Whether a register of that letter can hold `bits` bits; integer ones have room to spare."""
    if letter in "bfd":
        return bits == LETTER_BITS[letter]
    return bits <= LETTER_BITS[letter]


def unknown_operand(text: str, count: int) -> str | None:
    """What follows a `$` in the text that names none of `count` operands; None if all do."""
    for match in _DOLLAR.finditer(text):
        number = match[1] or match[2]
        if number is not None and int(number) >= count:
            return match[0]
        if match[3] is not None:
            return match[0].strip()
    return None
