"""Decoding of arithmetic: one PTX instruction to an `Alu` (numerics function and operands).

An Alu writes one register and has no other effect, so the block compiler can write it inline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from minitriton.runtime.emulator import carry, numerics
from minitriton.runtime.emulator.module import Ins, Reg, Sink, type_bytes
from minitriton.runtime.emulator.operands import SIGNED, UNSIGNED, reader, writer
from minitriton.runtime.emulator.syntax import Immediate, Pair, Vector


@dataclass(frozen=True, slots=True)
class Alu:
    """``dest = function(*sources)``; sources are (operand, bits, type for literals)."""

    dest: Reg
    function: Callable[..., Any]
    sources: tuple[tuple[Any, int, str], ...]
    takes_out: bool


Decoded = Alu | Callable[[Any, Any], None]

_COMPARISONS_NAMES = "eq ne lt le gt ge lo ls hi hs equ neu ltu leu gtu geu num nan"
_COMPARISONS = frozenset(_COMPARISONS_NAMES.split())
_TYPES_NAMES = (
    "pred b8 b16 b32 b64 u8 u16 u32 u64 s8 s16 s32 s64 f16 f16x2 bf16 bf16x2 f32 f64 u16x2 "
    "s16x2 tf32 e4m3x2 e5m2x2 e4m3x4 e5m2x4 e2m1x2 e2m3x2 e3m2x2 ue8m0x2"
)
_TYPES = frozenset(_TYPES_NAMES.split())
_SOURCES_32 = {"shl": (1,), "shr": (1,), "bfe": (1, 2), "bfi": (2, 3), "shf": (2,)}
_RESULT_32 = frozenset({"popc", "clz", "bfind"})
_SIMPLE_NAMES = (
    "add sub mul mad fma div rem neg abs min max and or xor not cnot shl shr ex2 lg2 rcp "
    "rsqrt sqrt sin cos tanh copysign bfe bfi bfind brev popc clz prmt shf dp4a sad bmsk "
    "szext mul24 mad24 testp"
)
_SIMPLE = _SIMPLE_NAMES.split()
_ONE_SOURCE_NAMES = "neg abs not cnot ex2 lg2 rcp rsqrt sqrt sin cos tanh bfind brev popc clz testp"
_THREE_SOURCES_NAMES = "mad fma bfe prmt shf dp4a sad mad24 min max"
_MOST_SOURCES = {  # the others have two
    **dict.fromkeys(_ONE_SOURCE_NAMES.split(), 1),
    **dict.fromkeys(_THREE_SOURCES_NAMES.split(), 3),
    "bfi": 4,
}


def bits_of(type_name: str) -> int:
    return 1 if type_name == "pred" else 8 * type_bytes(type_name)


def _resolve(ins: Ins, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (numerics.UnsupportedOperation, ValueError, KeyError) as problem:
        raise ins.unsupported(str(problem)) from None


def simple(ins: Ins) -> Decoded:
    """Instructions whose operands all have the instruction's type, with listed exceptions."""
    if carry.uses_carry(ins):
        return carry.chained(ins)
    op, type_name = ins.op, ins.type
    mods = frozenset(ins.mods[:-1])
    most = _MOST_SOURCES.get(op, 2)
    if len(ins.ops) > 1 + most:
        raise ins.unsupported(f"{ins.op} has at most {1 + most} operands")
    if op == "dp4a":
        type_name = ".".join(ins.mods[-2:])
        mods = frozenset()
        widths = [32, 32, 32]
        result = 32
    else:
        bits = bits_of(type_name)
        widths = [bits] * (len(ins.ops) - 1)
        result = bits
        for position in _SOURCES_32.get(op, ()):
            widths[position] = 32
        if op in _RESULT_32:
            result = 32
        if "wide" in mods:
            result = 2 * bits
            if op.startswith("mad"):
                widths[2] = 2 * bits
        if op == "testp":
            result = 1
        if op == "prmt" and len(ins.mods) == 2 and ins.mods[0] == "b32":
            type_name, mods = "b32", frozenset({ins.mods[1]})
            widths, result = [32, 32, 32], 32
        if op == "mad" and type_name == "f32":
            op = "fma"
    function = _resolve(ins, lambda: numerics.arith(op, type_name, mods))
    literal = type_name if type_name in ("f32", "f64") else ""
    sources = tuple((o, w, literal) for o, w in zip(ins.ops[1:], widths, strict=False))
    return _finish(ins, ins.ops[0], result, function, sources, True)


def _finish(
    ins: Ins,
    dest: Any,
    bits: int,
    function: Callable[..., Any],
    sources: tuple[tuple[Any, int, str], ...],
    takes_out: bool,
    signed: bool = False,
) -> Decoded:
    if isinstance(dest, Sink):
        return lambda c, ix: None
    if isinstance(dest, Vector) and len(dest.items) == 1:
        dest = dest.items[0]
    if not isinstance(dest, Reg) or dest.bits < bits:
        raise ins.unsupported(f"destination must be a register of at least {bits} bits")
    if dest.bits > bits:
        function, takes_out = _widened(function, bits, dest.bits, signed), False
    if all(isinstance(o, Immediate) for o, _, _ in sources) and sources:
        takes_out = False
    return Alu(dest, function, sources, takes_out)


def _widened(function: Callable[..., Any], bits: int, to: int, signed: bool) -> Callable[..., Any]:
    if not signed or bits == 1:
        wide = UNSIGNED[to]
        return lambda *a: np.asarray(function(*a)).astype(wide)
    narrow, middle, wide = SIGNED[bits], SIGNED[to], UNSIGNED[to]
    return lambda *a: np.asarray(function(*a)).view(narrow).astype(middle).view(wide)


def lop3(ins: Ins) -> Decoded:
    table = ins.ops[4]
    if "and" in ins.mods or "or" in ins.mods or not isinstance(table, Immediate):
        raise ins.unsupported("lop3 with a predicate result")
    inner = _resolve(ins, lambda: numerics.arith("lop3", "b32", frozenset()))
    value = table.value & 255
    sources = tuple((o, 32, "") for o in ins.ops[1:4])
    return _finish(ins, ins.ops[0], 32, lambda a, b, d: inner(a, b, d, value), sources, False)


def selp(ins: Ins) -> Decoded:
    bits = bits_of(ins.type)
    literal = ins.type if ins.type in ("f32", "f64") else ""
    sources = ((ins.ops[1], bits, literal), (ins.ops[2], bits, literal), (ins.ops[3], 1, ""))
    return _finish(ins, ins.ops[0], bits, lambda a, b, p: np.where(p, a, b), sources, False)


def slct(ins: Ins) -> Decoded:
    bits, last = bits_of(ins.mods[-2]), ins.mods[-1]
    view = np.dtype(np.int32 if last == "s32" else np.float32)
    sources = ((ins.ops[1], bits, ""), (ins.ops[2], bits, ""), (ins.ops[3], 32, ""))
    return _finish(
        ins, ins.ops[0], bits, lambda a, b, k: np.where(k.view(view) >= 0, a, b), sources, False
    )


def setp(ins: Ins) -> Decoded:
    """setp and set: comparison, optional boolean combination, one or two destinations."""
    comparison = next(m for m in ins.mods if m in _COMPARISONS)
    types = [m for m in ins.mods if m in _TYPES]
    type_name, ftz = types[-1], "ftz" in ins.mods
    combine = next((m for m in ins.mods if m in ("and", "or", "xor")), "")
    if type_name in ("f16x2", "bf16x2"):
        return _packed_setp(ins, comparison, type_name, ftz)
    test = _resolve(ins, lambda: numerics.compare(comparison, type_name, ftz))
    bits = bits_of(type_name)
    literal = type_name if type_name in ("f32", "f64") else ""
    sources: tuple[Any, ...] = tuple((o, bits, literal) for o in ins.ops[1:3])
    function = test
    join = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}.get(combine)
    if join is not None:
        sources += ((ins.ops[3], 1, ""),)
        function = lambda a, b, p: join(test(a, b), p)  # noqa: E731
    if ins.op == "set":
        one = np.uint32(0x3F800000 if types[0] == "f32" else 0xFFFFFFFF)
        plain = function
        function = lambda *a: np.where(plain(*a), one, np.uint32(0))  # noqa: E731
        return _finish(ins, ins.ops[0], 32, function, sources, False)
    if not isinstance(ins.ops[0], Pair):
        return _finish(ins, ins.ops[0], 1, function, sources, False)
    negated = lambda a, b: ~test(a, b)  # noqa: E731
    if join is not None:
        second: Any = lambda a, b, p: join(~test(a, b), p)  # noqa: E731
    else:
        second = negated
    return _two_results(ins, function, second, sources)


def _two_results(ins: Ins, first: Any, second: Any, sources: Any) -> Decoded:
    reads = [reader(ins, o, bits, literal) for o, bits, literal in sources]
    write_a, write_b = writer(ins, ins.ops[0].first, 1), writer(ins, ins.ops[0].second, 1)

    def run(c: Any, ix: Any) -> None:
        values = [read(c, ix) for read in reads]
        a, b = first(*values), second(*values)
        write_a(c, ix, a)
        write_b(c, ix, b)

    return run


def _packed_setp(ins: Ins, comparison: str, type_name: str, ftz: bool) -> Decoded:
    test = _resolve(ins, lambda: numerics.compare(comparison, type_name[:-2], ftz))
    if len(ins.ops) != 3:
        raise ins.unsupported("packed setp with a boolean combination")
    half = np.uint32(16)
    low: Any = lambda a, b: test(a.astype(np.uint16), b.astype(np.uint16))  # noqa: E731
    high: Any = lambda a, b: test(  # noqa: E731
        (a >> half).astype(np.uint16), (b >> half).astype(np.uint16)
    )
    sources = tuple((o, 32, "") for o in ins.ops[1:3])
    return _two_results(ins, low, high, sources)


def cvt(ins: Ins) -> Decoded:
    """cvt of every pair of types, and the packing forms with two or more sources."""
    types = [m for m in ins.mods if m in _TYPES]
    if ins.mods[:1] == ("pack",):
        raise ins.unsupported()
    dst, src = types[0], types[1]
    rounding = next((m for m in ins.mods if m in _ROUNDINGS), None)
    flags = {name: name in ins.mods for name in ("sat", "ftz", "relu", "satfinite")}
    function = _resolve(ins, lambda: numerics.convert(dst, src, rounding, **flags))
    source_bits = bits_of(src)
    sources = tuple((o, source_bits, "") for o in ins.ops[1:])
    return _finish(ins, ins.ops[0], bits_of(dst), function, sources, False, signed=dst[0] == "s")


_ROUNDINGS_NAMES = "rn rz rm rp rna rs rni rzi rmi rpi"
_ROUNDINGS = frozenset(_ROUNDINGS_NAMES.split())


def mov(ins: Ins) -> Decoded:
    """mov of registers, literals, addresses, and packing or unpacking of vectors."""
    dest, source = ins.ops
    bits = bits_of(ins.type)
    if isinstance(source, Vector):
        return _pack(ins, dest, source, bits)
    if isinstance(dest, Vector):
        return _unpack(ins, dest, source, bits)
    if isinstance(source, Reg) and source.bits != bits and bits != 1:
        raise ins.unsupported(f"register {source.name} is {source.bits} bits")
    literal = ins.type if ins.type in ("f32", "f64") else ""
    return _finish(ins, dest, bits, _copy, ((source, bits, literal),), False)


def _copy(a: np.ndarray) -> np.ndarray:
    return a


def _pack(ins: Ins, dest: Any, source: Vector, bits: int) -> Decoded:
    width = bits // len(source.items)
    if width < 8:
        raise ins.unsupported("vector of less than 8 bits per element")
    wide = UNSIGNED[bits]
    shifts = [wide.type(width * k) for k in range(len(source.items))]

    def function(*parts: np.ndarray) -> np.ndarray:
        total = parts[0].astype(wide)
        for part, shift in zip(parts[1:], shifts[1:], strict=True):
            total = total | (part.astype(wide) << shift)
        return total

    return _finish(ins, dest, bits, function, tuple((o, width, "") for o in source.items), False)


def _unpack(ins: Ins, dest: Vector, source: Any, bits: int) -> Decoded:
    width = bits // len(dest.items)
    read, narrow, wide = reader(ins, source, bits), UNSIGNED[width], UNSIGNED[bits]
    writes = [writer(ins, d, width) for d in dest.items]
    shifts = [wide.type(width * k) for k in range(len(writes))]

    def run(c: Any, ix: Any) -> None:
        value = read(c, ix)
        parts = [(value >> shift).astype(narrow) for shift in shifts]
        for write, part in zip(writes, parts, strict=True):
            write(c, ix, part)

    return run


def predicate_logic(ins: Ins) -> Decoded:
    """and, or, xor and not on predicates, whose operands may be negated."""
    table = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
    function = np.logical_not if ins.op == "not" else table[ins.op]
    return _finish(ins, ins.ops[0], 1, function, tuple((o, 1, "") for o in ins.ops[1:]), True)


def bitwise(ins: Ins) -> Decoded:
    return predicate_logic(ins) if ins.type == "pred" else simple(ins)


RULES: dict[str, Callable[[Ins], Decoded]] = {
    **dict.fromkeys(_SIMPLE, simple),
    **dict.fromkeys(("and", "or", "xor", "not"), bitwise),
    "lop3": lop3,
    "selp": selp,
    "slct": slct,
    "setp": setp,
    "set": setp,
    "cvt": cvt,
    "mov": mov,
    **carry.RULES,
}
