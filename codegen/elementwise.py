"""arith and math operations that exist in LLVM as they are: one scalar operation per register.

Integer and pointer results are lazy (see tile.py); float results are emitted at once. Rules for
operations that need an expansion of their own stand in math.py and casts.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from minitriton.codegen.emit import attribute, width_of
from minitriton.codegen.tile import Tile, carried
from minitriton.ir.dialect import PtrType, element_of
from minitriton.ir.encoding import layout_of
from minitriton.ir.mlir import ir

if TYPE_CHECKING:
    from minitriton.codegen.lower import Lowering

Scalar = Callable[..., ir.Value]  # (Lowering, *operands) -> result, emitted at the insertion point

FLOATS = (ir.F16Type, ir.BF16Type, ir.F32Type, ir.F64Type, ir.Float8E4M3FNType, ir.Float8E5M2Type)


def is_float(type_: ir.Type) -> bool:
    """Whether a scalar type is a float."""
    return isinstance(type_, FLOATS)


def map_registers(
    lowering: Lowering, op: ir.Operation, scalar: Callable[[Sequence[ir.Value]], ir.Value]
) -> None:
    """Result of `op`: `scalar` on the operands' values register by register.

    Scalar operands of a tile operation (select's condition) are the same for all registers.
    """
    result = op.results[0]
    operands = [lowering.value(v) for v in op.operands]
    type_ = result.type
    if not isinstance(type_, ir.RankedTensorType):
        lowering.set(result, scalar(operands))
        return
    sources = [v.registers if isinstance(v, Tile) else None for v in operands]

    def at(register: int) -> ir.Value:
        return scalar(
            [
                operands[k] if source is None else source[register]
                for k, source in enumerate(sources)
            ]
        )

    layout = layout_of(type_)
    if is_float(type_.element_type):
        lowering.set_registers(result, [at(r) for r in layout.registers])
    elif width_of(type_.element_type) == 1:
        lowering.set_registers(result, _lazy_mask(lowering, result, at))
    else:
        lowering.set_registers(result, lowering.lazy(layout.num_registers, at))


def _lazy_mask(
    lowering: Lowering, result: ir.Value, at: Callable[[int], ir.Value]
) -> Sequence[ir.Value]:
    """Registers of a tile of i1, one for all elements that are known to be equal: a predicate for
    each element would take a register apiece, and LLVM knows no divisibilities."""
    layout, runs = layout_of(result.type), lowering.axis.equal_runs(result)
    leaders: dict[tuple[int, ...], int] = {}
    leader = {
        register: leaders.setdefault(
            tuple(c // run for c, run in zip(layout.apply(register=register), runs, strict=True)),
            register,
        )
        for register in layout.registers
    }
    registers = lowering.lazy(
        layout.num_registers, lambda r: at(r) if leader[r] == r else registers[leader[r]]
    )
    return registers


def rule(scalar: Scalar) -> Callable[[Lowering, ir.Operation], None]:
    """A rule from a function (Lowering, *scalar operands) -> scalar result."""

    def lower(lowering: Lowering, op: ir.Operation) -> None:
        map_registers(lowering, op, lambda values: scalar(lowering, *values))

    return lower


def _plain(lowering: Lowering, op: ir.Operation) -> None:
    """The same operation on each register, with the attributes of the original."""
    element = carried(element_of(op.results[0].type))
    attributes = {name: op.attributes[name] for name in _names(op)}
    name, builder = op.name, lowering.builder
    if name in _FUSED and lowering.options.enable_fp_fusion:
        attributes["fastmath"] = attribute("#arith.fastmath<contract>")
    if name in _FUSED and element in (lowering.f16, lowering.bf16):
        registers = [list(lowering.registers(v)) for v in op.operands]
        if len(registers[0]) > 1:
            _in_pairs(lowering, op, registers, attributes)
            return
    types = [element]
    map_registers(
        lowering, op, lambda values: builder.create(name, types, values, attributes).results[0]
    )


def _in_pairs(
    lowering: Lowering,
    op: ir.Operation,
    operands: Sequence[Sequence[ir.Value]],
    attributes: dict[str, ir.Attribute],
) -> None:
    """A 16-bit operation on registers 2i and 2i + 1 together, as they lie in memory. LLVM would
    find pairs by itself, but in an order that costs two moves each."""
    types = [ir.VectorType.get([2], operands[0][0].type)]
    results: list[ir.Value] = []
    for i in range(0, len(operands[0]), 2):
        pairs = [lowering.pack(values[i : i + 2]) for values in operands]
        created = lowering.builder.create(op.name, types, pairs, attributes)
        results += lowering.unpack(created.results[0])
    lowering.set_registers(op.results[0], results)


def _names(op: ir.Operation) -> list[str]:
    """Names of the attributes that are the operation's own (`mt.*` ones are notes of passes)."""
    attributes = op.attributes
    names = [attributes[i].name for i in range(len(attributes))]
    return [name for name in names if not name.startswith("mt.")]


def _constant(lowering: Lowering, op: ir.Operation) -> None:
    type_, value = op.results[0].type, op.attributes["value"]
    if isinstance(type_, ir.RankedTensorType):
        value = ir.DenseElementsAttr(value).get_splat_value()
    element = element_of(type_)
    if isinstance(element, ir.IntegerType):
        scalar = lowering.constant(element, ir.IntegerAttr(value).value)
    elif width_of(element) == 8:  # fp8 lives in an i8
        scalar = lowering.constant(lowering.i8, fp8_bits(ir.FloatAttr(value).value, element))
    else:
        scalar = lowering.constant(element, ir.FloatAttr(value).value)
    if not isinstance(type_, ir.RankedTensorType):
        lowering.set(op.results[0], scalar)
        return
    layout = layout_of(type_)
    lowering.set(op.results[0], Tile(layout, scalar.type, [scalar] * layout.num_registers))
    lowering.keep_lazy()


def fp8_bits(value: float, type_: ir.Type) -> int:
    """Encoding of a float that the type holds exactly (constants were rounded by MLIR)."""
    mantissa, bias = (3, 7) if isinstance(type_, ir.Float8E4M3FNType) else (2, 15)
    decoded = {}
    for code in range(128):
        exponent, fraction = code >> mantissa, code & ((1 << mantissa) - 1)
        if exponent:
            decoded[(1 + fraction / (1 << mantissa)) * 2.0 ** (exponent - bias)] = code
        else:
            decoded[fraction / (1 << mantissa) * 2.0 ** (1 - bias)] = code
    if mantissa == 2:
        decoded[float("inf")] = 0x7C
    sign = 0x80 if math.copysign(1.0, value) < 0 else 0
    return sign | decoded.get(abs(value), 0x7F)


# Shifts by the width or more give 0, or the sign for an arithmetic one; LLVM leaves them undefined.


def _shift(name: str) -> Scalar:
    def scalar(lowering: Lowering, value: ir.Value, amount: ir.Value) -> ir.Value:
        type_, width = value.type, value.type.width
        limit = lowering.constant(type_, width - 1)
        if name == "shrsi":
            clamped = lowering.op("arith.minui", type_, (amount, limit))
            return lowering.binary(name, value, clamped)
        fits = lowering.compare("ule", amount, limit)
        shifted = lowering.binary(name, value, lowering.and_(amount, limit))
        return lowering.select(fits, shifted, lowering.constant(type_, 0))

    return scalar


def _shift_rule(name: str) -> Callable[[Lowering, ir.Operation], None]:
    clamped = rule(_shift(name))

    def lower(lowering: Lowering, op: ir.Operation) -> None:
        width = width_of(element_of(op.results[0].type))
        if _known_below(op.operands[1], width):
            _plain(lowering, op)
        else:
            clamped(lowering, op)

    return lower


def _known_below(value: ir.Value, limit: int) -> bool:
    """Whether an integer value is a constant in 0 .. limit-1."""
    owner = value.owner
    if not isinstance(owner, ir.Operation):
        owner = getattr(owner, "operation", None)
    if not isinstance(owner, ir.Operation):
        return False
    if owner.name == "mt.splat":
        return _known_below(owner.operands[0], limit)
    if owner.name != "arith.constant":
        return False
    constant = owner.attributes["value"]
    if isinstance(value.type, ir.RankedTensorType):
        constant = ir.DenseElementsAttr(constant).get_splat_value()
    return 0 <= ir.IntegerAttr(constant).value < limit


def _select(lowering: Lowering, op: ir.Operation) -> None:
    type_ = carried(element_of(op.results[0].type))
    map_registers(lowering, op, lambda values: lowering.op("arith.select", type_, values))


def _addptr(lowering: Lowering, op: ir.Operation) -> None:
    pointee = PtrType(element_of(op.results[0].type)).pointee
    element = carried(pointee)

    def scalar(values: Sequence[ir.Value]) -> ir.Value:
        pointer, offset = values
        return lowering.offset_pointer(pointer, offset, element)

    map_registers(lowering, op, scalar)


def _absi(lowering: Lowering, value: ir.Value) -> ir.Value:
    negated = lowering.binary("subi", lowering.constant(value.type, 0), value)
    return lowering.op("arith.maxsi", value.type, (value, negated))


def _mulhi(lowering: Lowering, lhs: ir.Value, rhs: ir.Value) -> ir.Value:
    type_ = lhs.type
    wide = ir.IntegerType.get_signless(2 * type_.width)
    product = lowering.mul(*(lowering.op("arith.extui", wide, (v,)) for v in (lhs, rhs)))
    return lowering.op("arith.trunci", type_, (lowering.shr(product, type_.width),))


# bf16 arithmetic goes to LLVM as it is: below sm_90 it promotes to f32 and rounds each result
_FUSED = frozenset({"arith.addf", "arith.subf", "arith.mulf"})
_PLAIN = (
    "addi", "subi", "muli", "andi", "ori", "xori", "cmpi", "cmpf",
    "divsi", "divui", "remsi", "remui", "minsi", "maxsi", "minui", "maxui",
    "extsi", "extui", "trunci",
    "addf", "subf", "mulf", "negf", "maximumf", "minimumf", "maxnumf", "minnumf",
)  # fmt: skip

RULES = {
    **{f"arith.{name}": _plain for name in _PLAIN},
    **{f"arith.{name}": _shift_rule(name) for name in ("shli", "shrsi", "shrui")},
    "math.absf": _plain,
    "math.fma": _plain,
    "math.floor": _plain,
    "math.ceil": _plain,
    "math.absi": rule(_absi),
    "arith.constant": _constant,
    "arith.select": _select,
    "mt.addptr": _addptr,
    "mt.mulhi": rule(_mulhi),
}
