"""Float arithmetic on one type: the notation in which math.py and math64.py are written.

No operation carries fast-math flags: the expansions rely on exact rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from minitriton.ir.mlir import ir

if TYPE_CHECKING:
    from minitriton.codegen.lower import Lowering

# arith.cmpf predicates by number
ORDERED = {"oeq": 1, "ogt": 2, "oge": 3, "olt": 4, "ole": 5, "one": 6, "uno": 14}


class Floats:
    """Emits scalar operations on f32 or f64; Python numbers become constants."""

    def __init__(self, lowering: Lowering, type_: ir.Type) -> None:
        self.lowering = lowering
        self.type = type_
        self.bits_type = lowering.i32 if type_ == lowering.f32 else lowering.i64

    def value(self, number: ir.Value | float) -> ir.Value:
        if isinstance(number, (int, float)):
            return self.lowering.constant(self.type, float(number))
        return number

    def op(self, name: str, *operands: ir.Value | float) -> ir.Value:
        return self.lowering.op(name, self.type, [self.value(v) for v in operands])

    def add(self, lhs: ir.Value | float, rhs: ir.Value | float) -> ir.Value:
        return self.op("arith.addf", lhs, rhs)

    def sub(self, lhs: ir.Value | float, rhs: ir.Value | float) -> ir.Value:
        return self.op("arith.subf", lhs, rhs)

    def mul(self, lhs: ir.Value | float, rhs: ir.Value | float) -> ir.Value:
        return self.op("arith.mulf", lhs, rhs)

    def div(self, lhs: ir.Value | float, rhs: ir.Value | float) -> ir.Value:
        """IEEE division."""
        return self.op("arith.divf", lhs, rhs)

    def fma(self, a: ir.Value | float, b: ir.Value | float, c: ir.Value | float) -> ir.Value:
        return self.op("math.fma", a, b, c)

    def abs(self, value: ir.Value) -> ir.Value:
        return self.op("math.absf", value)

    def copysign(self, magnitude: ir.Value | float, sign: ir.Value) -> ir.Value:
        return self.op("math.copysign", magnitude, sign)

    def at_least(self, value: ir.Value, bound: float) -> ir.Value:
        return self.op("arith.maxnumf", value, bound)

    def at_most(self, value: ir.Value, bound: float) -> ir.Value:
        return self.op("arith.minnumf", value, bound)

    def compare(self, predicate: str, lhs: ir.Value, rhs: ir.Value | float) -> ir.Value:
        """Ordered comparison (or "uno"): i1."""
        index = ir.IntegerAttr.get(self.lowering.i64, ORDERED[predicate])
        return self.lowering.op(
            "arith.cmpf", self.lowering.i1, (lhs, self.value(rhs)), {"predicate": index}
        )

    def select(self, condition: ir.Value, lhs: ir.Value | float, rhs: ir.Value | float) -> ir.Value:
        return self.lowering.select(condition, self.value(lhs), self.value(rhs))

    def polynomial(self, x: ir.Value, coefficients: Sequence[float]) -> ir.Value:
        """Horner's scheme, highest power first."""
        result = self.value(coefficients[0])
        for coefficient in coefficients[1:]:
            result = self.fma(result, x, coefficient)
        return result

    def bits(self, value: ir.Value) -> ir.Value:
        """The encoding as an integer."""
        return self.lowering.bitcast(value, self.bits_type)

    def from_bits(self, value: ir.Value) -> ir.Value:
        return self.lowering.bitcast(value, self.type)

    def approximate(self, instruction: str, *operands: ir.Value) -> ir.Value:
        """One f32 PTX instruction, such as `rcp.approx.f32`."""
        listed = ", ".join(f"${i + 1}" for i in range(len(operands)))
        constraints = ",".join(["=f"] + ["f"] * len(operands))
        (result,) = self.lowering.asm(
            f"{instruction} $0, {listed};", constraints, [self.type], operands, effects=False
        )
        return result
