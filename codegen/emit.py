"""Emission of scalar LLVM-level operations: what every lowering rule writes with.

Operations go in through the generic builder (1 us each). Constants and values that depend on the
thread only are made once, at the entry of the kernel, and dominate every use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from minitriton.ir.builder import Builder
from minitriton.ir.mlir import ir

DYNAMIC_INDEX = -(1 << 31)  # marks a run-time index in llvm.getelementptr
PREDICATES = ("eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge")


@functools.cache
def attribute(text: str) -> ir.Attribute:
    """A parsed attribute; parsing costs a microsecond, so it happens once per spelling."""
    return ir.Attribute.parse(text)


@functools.cache
def type_named(text: str) -> ir.Type:
    """A parsed type, such as `!llvm.ptr<3>`."""
    return ir.Type.parse(text)


def width_of(type_: ir.Type) -> int:
    """Bits of a carried scalar type; pointers have 64."""
    return type_.width if hasattr(type_, "width") else 64


class Emitter:
    """Writes operations at `builder`'s insertion point; `entry` is a place in the entry block."""

    def __init__(self, builder: Builder, entry: ir.InsertionPoint) -> None:
        self.builder = builder
        self.entry = entry
        self.i1, self.i8, self.i16, self.i32, self.i64 = (
            ir.IntegerType.get_signless(n) for n in (1, 8, 16, 32, 64)
        )
        self.f16, self.bf16 = ir.F16Type.get(), ir.BF16Type.get()
        self.f32, self.f64 = ir.F32Type.get(), ir.F64Type.get()
        self.pointer = type_named("!llvm.ptr<1>")
        self.shared_pointer = type_named("!llvm.ptr<3>")
        self._constants: dict[tuple[ir.Type, int | float | bool | str], ir.Value] = {}

    # Operations

    def create(
        self,
        name: str,
        results: Sequence[ir.Type],
        operands: Sequence[ir.Value] = (),
        attributes: Mapping[str, ir.Attribute] | None = None,
        regions: int = 0,
    ) -> ir.Operation:
        """The new operation."""
        return self.builder.create(name, results, operands, attributes, regions)

    def op(
        self,
        name: str,
        result: ir.Type,
        operands: Sequence[ir.Value] = (),
        attributes: Mapping[str, ir.Attribute] | None = None,
    ) -> ir.Value:
        """The only result of a new operation."""
        return self.builder.op(name, result, operands, attributes)

    def constant(self, type_: ir.Type, value: int | float | bool) -> ir.Value:
        """A scalar constant, shared by the whole kernel."""
        key = (type_, repr(value))  # 0.0 and -0.0 are equal but not the same constant
        found = self._constants.get(key)
        if found is None:
            with self.builder.at(self.entry):
                found = self._constants[key] = self.builder.constant(type_, value)
        return found

    def int32(self, value: int) -> ir.Value:
        """An i32 constant."""
        return self.constant(self.i32, value)

    def zero(self, type_: ir.Type) -> ir.Value:
        """The zero (or null pointer) of a carried type."""
        if type_ == self.pointer:
            key = (type_, "null")
            if key not in self._constants:
                with self.builder.at(self.entry):
                    self._constants[key] = self.builder.op("llvm.mlir.zero", type_)
            return self._constants[key]
        return self.constant(type_, 0 if isinstance(type_, ir.IntegerType) else 0.0)

    def binary(self, name: str, lhs: ir.Value, rhs: ir.Value | int | float) -> ir.Value:
        """`arith.<name>` of two scalars of one type; a Python number becomes a constant."""
        type_ = lhs.type
        if not isinstance(rhs, ir.Value):
            rhs = self.constant(type_, rhs)
        return self.builder.op("arith." + name, type_, (lhs, rhs))

    def add(self, lhs: ir.Value, rhs: ir.Value | int) -> ir.Value:
        return self.binary("addi", lhs, rhs)

    def mul(self, lhs: ir.Value, rhs: ir.Value | int) -> ir.Value:
        return self.binary("muli", lhs, rhs)

    def and_(self, lhs: ir.Value, rhs: ir.Value | int) -> ir.Value:
        return self.binary("andi", lhs, rhs)

    def or_(self, lhs: ir.Value, rhs: ir.Value | int) -> ir.Value:
        return self.binary("ori", lhs, rhs)

    def xor(self, lhs: ir.Value, rhs: ir.Value | int) -> ir.Value:
        return self.binary("xori", lhs, rhs)

    def shl(self, lhs: ir.Value, amount: int) -> ir.Value:
        return self.binary("shli", lhs, amount) if amount else lhs

    def shr(self, lhs: ir.Value, amount: int) -> ir.Value:
        """Logical shift right."""
        return self.binary("shrui", lhs, amount) if amount else lhs

    def compare(self, predicate: str, lhs: ir.Value, rhs: ir.Value | int) -> ir.Value:
        """Integer comparison, e.g. "slt"; i1."""
        if not isinstance(rhs, ir.Value):
            rhs = self.constant(lhs.type, rhs)
        index = ir.IntegerAttr.get(self.i64, PREDICATES.index(predicate))
        return self.builder.op("arith.cmpi", self.i1, (lhs, rhs), {"predicate": index})

    def select(self, condition: ir.Value, lhs: ir.Value, rhs: ir.Value) -> ir.Value:
        return self.builder.op("arith.select", lhs.type, (condition, lhs, rhs))

    def bitcast(self, value: ir.Value, type_: ir.Type) -> ir.Value:
        """The same bits as another type of the same width (scalars, vectors)."""
        if value.type == type_:
            return value
        return self.builder.op("llvm.bitcast", type_, (value,))

    def branch(
        self,
        condition: ir.Value,
        types: Sequence[ir.Type],
        then: Callable[[], Sequence[ir.Value]],
        otherwise: Callable[[], Sequence[ir.Value]] | None = None,
    ) -> list[ir.Value]:
        """scf.if: both callables emit their side and return its results."""
        op = self.create("scf.if", types, (condition,), regions=2)
        for region, side in zip(op.regions, (then, otherwise), strict=True):
            if side is not None:
                with self.builder.at(ir.InsertionPoint(region.blocks.append())):
                    self.create("scf.yield", (), side())
        return list(op.results)

    # Vectors

    def pack(self, values: Sequence[ir.Value]) -> ir.Value:
        """A vector of scalars of one type."""
        type_ = ir.VectorType.get([len(values)], values[0].type)
        return self.builder.op("vector.from_elements", type_, values)

    def unpack(self, vector: ir.Value) -> list[ir.Value]:
        """The elements of a rank-1 vector."""
        type_ = ir.VectorType(vector.type)
        types = [type_.element_type] * type_.shape[0]
        return list(self.builder.create("vector.to_elements", types, (vector,)).results)

    def split_bits(self, value: ir.Value, type_: ir.Type, count: int) -> list[ir.Value]:
        """`count` scalars of `type_`, lowest bits first, that make up the bits of `value`."""
        if count == 1:
            return [self.bitcast(value, type_)]
        if type_ == self.i8:
            return [self.op("arith.trunci", type_, (self.shr(value, 8 * i),)) for i in range(count)]
        return self.unpack(self.bitcast(value, ir.VectorType.get([count], type_)))

    def join_bits(self, values: Sequence[ir.Value], type_: ir.Type) -> ir.Value:
        """The inverse of `split_bits`: one value of `type_` from the bits of several.

        Bytes are shifted together: LLVM would build vectors of them with half undefined permutes.
        """
        if len(values) == 1:
            return self.bitcast(values[0], type_)
        if values[0].type == self.i8:
            wide = [self.op("arith.extui", type_, (v,)) for v in values]
            return functools.reduce(self.or_, (self.shl(v, 8 * i) for i, v in enumerate(wide)))
        return self.bitcast(self.pack(values), type_)

    # Memory

    def offset_pointer(
        self, pointer: ir.Value, index: ir.Value | int, element: ir.Type | None = None
    ) -> ir.Value:
        """Pointer plus a signed index in elements (bytes if `element` is None)."""
        if not isinstance(index, ir.Value) and index == 0:
            return pointer
        static = not isinstance(index, ir.Value)
        attributes = {
            "rawConstantIndices": ir.DenseI32ArrayAttr.get([index if static else DYNAMIC_INDEX]),
            "elem_type": ir.TypeAttr.get(self.i8 if element is None else element),
            "noWrapFlags": ir.IntegerAttr.get(self.i32, 0),
        }
        operands = (pointer,) if static else (pointer, index)
        return self.builder.op("llvm.getelementptr", pointer.type, operands, attributes)

    def load(self, type_: ir.Type, pointer: ir.Value, alignment: int) -> ir.Value:
        """Plain load of a scalar or vector; `alignment` in bytes."""
        aligned = {"alignment": ir.IntegerAttr.get(self.i64, alignment)}
        return self.builder.op("llvm.load", type_, (pointer,), aligned)

    def store(self, value: ir.Value, pointer: ir.Value, alignment: int) -> None:
        """Plain store of a scalar or vector; `alignment` in bytes."""
        aligned = {"alignment": ir.IntegerAttr.get(self.i64, alignment)}
        self.builder.create("llvm.store", (), (value, pointer), aligned)

    # PTX

    def asm(
        self,
        text: str,
        constraints: str,
        results: Sequence[ir.Type],
        operands: Sequence[ir.Value] = (),
        *,
        effects: bool = True,
    ) -> list[ir.Value]:
        """Inline PTX: operands are $0, $1, ... with the results first, `$$` is a dollar sign.

        Constraint letters: b i1, h i16, r i32, l i64 or pointer, f f32, d f64. A wrong number of
        constraints would crash LLVM, so it is checked here.
        """
        parts = [c for c in constraints.split(",") if c and not c.startswith("~")]
        outputs = sum(c.startswith("=") for c in parts)
        assert outputs == len(results) and len(parts) == outputs + len(operands), (
            f"{constraints!r} does not fit {len(results)} results and {len(operands)} operands"
        )
        attributes: dict[str, ir.Attribute] = {
            "asm_string": ir.StringAttr.get(text),
            "constraints": ir.StringAttr.get(constraints),
        }
        if effects:
            attributes["has_side_effects"] = ir.UnitAttr.get()
        if len(results) > 1:
            struct = type_named(f"!llvm.struct<({', '.join(str(t) for t in results)})>")
            value = self.builder.op("llvm.inline_asm", struct, operands, attributes)
            return [
                self.builder.op(
                    "llvm.extractvalue", t, (value,), {"position": ir.DenseI64ArrayAttr.get([i])}
                )
                for i, t in enumerate(results)
            ]
        created = self.builder.create("llvm.inline_asm", results, operands, attributes)
        return list(created.results)

    def intrinsic(self, name: str, result: ir.Type, operands: Sequence[ir.Value]) -> ir.Value:
        """The result of an LLVM intrinsic such as `llvm.nvvm.ex2.approx.f`."""
        attributes = {
            "intrin": ir.StringAttr.get(name),
            "op_bundle_sizes": ir.DenseI32ArrayAttr.get([]),
        }
        segments = ir.DenseI32ArrayAttr.get([len(operands), 0])
        attributes["operandSegmentSizes"] = segments
        return self.builder.op("llvm.call_intrinsic", result, operands, attributes)

    # Linear maps

    def linear(self, terms: Sequence[tuple[ir.Value, Sequence[int]]]) -> ir.Value:
        """XOR over all terms (i32 value, bases) of the bases selected by the value's bits; i32."""
        pieces = [piece for value, bases in terms for piece in self._linear_pieces(value, bases)]
        result: ir.Value | None = None
        occupied = 0
        for piece, bits in pieces:
            if result is None:
                result = piece
            else:
                result = self.xor(result, piece) if occupied & bits else self.or_(result, piece)
            occupied |= bits
        return self.int32(0) if result is None else result

    def _linear_pieces(self, value: ir.Value, bases: Sequence[int]) -> list[tuple[ir.Value, int]]:
        """(part of the sum, bits it may set): one per run of bits that only shift."""
        pieces = []
        bit = 0
        while bit < len(bases):
            first, basis = bit, bases[bit]
            bit += 1
            if basis == 0:
                continue
            if basis & (basis - 1):
                spread = self.binary("shrsi", self.shl(value, 31 - first), 31)
                pieces.append((self.and_(spread, basis), basis))
                continue
            while bit < len(bases) and bases[bit] == basis << (bit - first):
                bit += 1
            mask = ((1 << bit) - 1) ^ ((1 << first) - 1)
            target = basis.bit_length() - 1
            moved = self.and_(value, mask)
            moved = (
                self.shl(moved, target - first)
                if target >= first
                else self.shr(moved, first - target)
            )
            pieces.append((moved, mask << target >> first))
        return pieces
