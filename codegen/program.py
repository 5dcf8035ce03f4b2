"""The program model: grid position, promises, barriers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from minitriton.ir.mlir import ir

if TYPE_CHECKING:
    from minitriton.codegen.lower import Lowering


def _special_register(name: str) -> Callable[[Lowering, ir.Operation], None]:
    def lower(lowering: Lowering, op: ir.Operation) -> None:
        axis = "xyz"[ir.IntegerAttr(op.attributes["axis"]).value]
        register = f"nvvm.read.ptx.sreg.{name}.{axis}"
        lowering.set(
            op.results[0], lowering.once(register, lambda: lowering.op(register, lowering.i32))
        )
        lowering.keep_lazy()

    return lower


def _hint(lowering: Lowering, op: ir.Operation) -> None:
    lowering.set(op.results[0], lowering.value(op.operands[0]))
    lowering.keep_lazy()


def _assume(lowering: Lowering, op: ir.Operation) -> None:
    lowering.create(
        "llvm.intr.assume",
        (),
        (lowering.scalar(op.operands[0]),),
        {"op_bundle_sizes": ir.DenseI32ArrayAttr.get([])},
    )


def _barrier(lowering: Lowering, op: ir.Operation) -> None:
    lowering.barrier()


RULES = {
    "mt.program_id": _special_register("ctaid"),
    "mt.num_programs": _special_register("nctaid"),
    "mt.hint": _hint,
    "mt.assume": _assume,
    "mt.barrier": _barrier,
}
