"""Between the language's element types and MLIR types."""

from __future__ import annotations

from minitriton.ir import dtypes
from minitriton.ir.dialect import PtrType
from minitriton.ir.mlir import ir


def to_mlir(type_: dtypes.AnyType) -> ir.Type:
    """MLIR type of a scalar, pointer or tile (without layout). int1 behind a pointer is i8."""
    match type_:
        case dtypes.block_type():
            return ir.RankedTensorType.get(list(type_.shape), to_mlir(type_.element_ty))
        case dtypes.pointer_type():
            pointee = type_.element_ty
            stored = dtypes.int8 if pointee.is_bool() else pointee
            return PtrType.get(ir.TypeAttr.get(to_mlir(stored)))
    if type_.is_int():
        return ir.IntegerType.get_signless(type_.bits)
    match type_.name:
        case "fp16":
            return ir.F16Type.get()
        case "bf16":
            return ir.BF16Type.get()
        case "fp32":
            return ir.F32Type.get()
        case "fp64":
            return ir.F64Type.get()
        case "fp8e5":
            return ir.Float8E5M2Type.get()
        case "fp8e4nv":
            return ir.Float8E4M3FNType.get()
    raise ValueError(f"{type_} has no MLIR type")


def bit_width(type_: ir.Type) -> int:
    """Bits of a scalar MLIR type: pointers have 64."""
    if isinstance(type_, ir.IntegerType):
        return type_.width
    if isinstance(type_, PtrType):
        return 64
    return type_.width
