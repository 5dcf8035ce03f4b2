"""PTX arithmetic on numpy arrays of raw register bits: the names the emulator core uses.

Operands are uint8/16/32/64 arrays (bool for predicates) or numpy scalars of those dtypes that
broadcast; never Python ints, except the table of lop3. Each function here resolves an
instruction once, at decode time; the callable it returns runs per execution, inside `quiet()`.
Callables of `arith` take `out=`, a bits array that may be one of the operands.
"""

from __future__ import annotations

from collections.abc import Callable

from minitriton.runtime.emulator.alu_float import SINGLE_RULES, floating
from minitriton.runtime.emulator.alu_integer import INTEGER_RULES, Operation
from minitriton.runtime.emulator.approx import APPROXIMATE_RULES
from minitriton.runtime.emulator.compare import Predicate, comparison, update
from minitriton.runtime.emulator.convert import conversion
from minitriton.runtime.emulator.formats import Bits, bits_dtype, quiet, width

FLOAT_TYPES = frozenset({"f16", "bf16", "f16x2", "bf16x2", "f32", "f64"})
FLOAT_RULES = {**SINGLE_RULES, **APPROXIMATE_RULES}
MODIFIERS = frozenset(
    {
        *("rn", "rz", "rm", "rp", "ftz", "noftz", "sat", "relu", "NaN", "xorsign", "abs"),
        *("approx", "full", "lo", "hi", "wide", "l", "r", "wrap", "clamp", "shiftamt"),
        *("f4e", "b4e", "rc8", "ecl", "ecr", "rc16"),
        *("finite", "infinite", "number", "notanumber", "normal", "subnormal"),
    }
)


class UnsupportedOperation(ValueError):
    """An instruction, type or modifier that the emulator does not implement."""


def arith(op: str, type: str, mods: frozenset[str] = frozenset()) -> Operation:
    """Resolve op.mods.type to callable(*bits, out=None) -> bits.

    Examples: arith("mad", "u32", frozenset({"lo"})), arith("fma", "f32", frozenset({"rn"})),
    arith("shf", "b32", frozenset({"l", "wrap"})), arith("dp4a", "u32.s32").
    Raises UnsupportedOperation.
    """
    try:
        if not mods <= MODIFIERS:
            raise KeyError(min(mods - MODIFIERS))
        if type in FLOAT_TYPES and op in FLOAT_RULES:
            return floating(op, type, mods, FLOAT_RULES)
        return INTEGER_RULES[op](type, mods)
    except KeyError as error:
        raise _unsupported(op, type, mods, error) from None


def convert(
    dst: str,
    src: str,
    rounding: str | None = None,
    sat: bool = False,
    ftz: bool = False,
    relu: bool = False,
    satfinite: bool = False,
) -> Callable[..., Bits]:
    """Resolve cvt.rounding.dst.src to callable(*bits) -> bits of dst's width.

    A source wider than its type is truncated first. Packing forms take (upper, lower). The
    core extends an 8- or 16-bit result to its register (by sign for s8 and s16).
    Raises UnsupportedOperation.
    """
    try:
        return conversion(dst, src, rounding, sat, ftz, relu, satfinite)
    except KeyError as error:
        mods = frozenset({rounding} if rounding else ())
        raise _unsupported("cvt", f"{dst}.{src}", mods, error) from None


def compare(op: str, type: str, ftz: bool = False) -> Callable[..., Predicate]:
    """Resolve setp.op.type to callable(a, b) -> bool array. Raises UnsupportedOperation."""
    try:
        return comparison(op, type, ftz)
    except KeyError as error:
        raise _unsupported("setp." + op, type, frozenset(), error) from None


def atomic(op: str, type: str, ftz: bool = False) -> Callable[..., Bits]:
    """Resolve atom.op.type to callable(old, operand) -> new; cas takes (old, compare, new).

    Raises UnsupportedOperation.
    """
    try:
        return update(op, type, ftz)
    except KeyError as error:
        raise _unsupported("atom." + op, type, frozenset(), error) from None


def _unsupported(
    op: str, ptx_type: str, mods: frozenset[str], error: KeyError
) -> UnsupportedOperation:
    name = ".".join([op, *sorted(mods), ptx_type])
    return UnsupportedOperation(f"the emulator has no rule for {name} (unknown: {error.args[0]})")


__all__ = [
    "UnsupportedOperation",
    "arith",
    "atomic",
    "bits_dtype",
    "compare",
    "convert",
    "quiet",
    "width",
]
