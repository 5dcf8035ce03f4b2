"""One mma.sync instruction in each of its types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minitriton.codegen.emit import attribute, type_named
from minitriton.codegen.lower import Lowering
from minitriton.ir.mlir import ir

Fragment = Sequence[ir.Value]
Mma = Callable[[Fragment, Fragment, list[ir.Value]], list[ir.Value]]


@dataclass(frozen=True)
class MmaKind:
    """PTX operand types of A and B, and depth k of the m16n8 instruction."""

    a: str
    b: str
    k: int


def mma_instruction(lowering: Lowering, kind: MmaKind, element: ir.Type) -> Mma:
    """d = mma(a, b, c): a and b as i32 words, c and d of type `element`, f16 as i32 words, too."""
    if kind.a in ("e4m3", "e5m2"):
        return _fp8(lowering, kind, element)
    halves = kind.a == "f16"
    member = ir.VectorType.get([2], lowering.f16) if element == lowering.f16 else element
    count = 2 if element == lowering.f16 else 4
    struct = type_named(f"!llvm.struct<({', '.join([str(member)] * count)})>")
    attributes = {
        "layoutA": attribute("#nvvm.mma_layout<row>"),
        "layoutB": attribute("#nvvm.mma_layout<col>"),
        "multiplicandAPtxType": attribute(f"#nvvm.mma_type<{kind.a}>"),
        "multiplicandBPtxType": attribute(f"#nvvm.mma_type<{kind.b}>"),
        "shape": attribute(f"#nvvm.shape<m = 16, n = 8, k = {kind.k}>"),
        "operandSegmentSizes": ir.DenseI32ArrayAttr.get([4, 2, count]),
    }
    if element == lowering.i32:
        attributes["intOverflowBehavior"] = attribute("#nvvm.mma_int_overflow<wrapped>")
    pair = ir.VectorType.get([2], lowering.f16)

    def mma(a: Fragment, b: Fragment, c: list[ir.Value]) -> list[ir.Value]:
        if halves:
            a, b = ([lowering.bitcast(word, pair) for word in words] for words in (a, b))
        c = [lowering.bitcast(value, member) for value in c]
        result = lowering.op("nvvm.mma.sync", struct, (*a, *b, *c), attributes)
        held = lowering.i32 if element == lowering.f16 else element
        return [
            lowering.bitcast(_member(lowering, result, index, member), held)
            for index in range(count)
        ]

    return mma


def _fp8(lowering: Lowering, kind: MmaKind, element: ir.Type) -> Mma:
    """The binding's op refuses e4m3, so this one is inline PTX."""
    assert element == lowering.f32, f"fp8 products are summed in f32, not in {element}"
    text = (
        f"mma.sync.aligned.m16n8k{kind.k}.row.col.f32.{kind.a}.{kind.b}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)

    def mma(a: Fragment, b: Fragment, c: list[ir.Value]) -> list[ir.Value]:
        return lowering.asm(text, constraints, [lowering.f32] * 4, (*a, *b, *c), effects=False)

    return mma


def _member(lowering: Lowering, struct: ir.Value, index: int, type_: ir.Type) -> ir.Value:
    position = {"position": ir.DenseI64ArrayAttr.get([index])}
    return lowering.op("llvm.extractvalue", type_, (struct,), position)
