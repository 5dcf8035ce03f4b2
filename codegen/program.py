"""The program model: grid position, promises, barriers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from minitriton.ir.mlir import ir

if TYPE_CHECKING:
    from minitriton.codegen.lower import Lowering


def _special_register(name: str) -> Callable[[Lowering, ir.Operation], None]:
    """Of the op's axis; x for those that have none."""

    def lower(lowering: Lowering, op: ir.Operation) -> None:
        axis = ir.IntegerAttr(op.attributes["axis"]).value if "axis" in op.attributes else 0
        register = f"nvvm.read.ptx.sreg.{name}.{'xyz'[axis]}"
        lowering.set(
            op.results[0], lowering.once(register, lambda: lowering.op(register, lowering.i32))
        )
        lowering.keep_lazy()

    return lower


_launched = _special_register("nctaid")


def _num_programs(lowering: Lowering, op: ir.Operation) -> None:
    """A parameter in a persistent kernel, of which fewer CTAs are launched."""
    if not lowering.grid_sizes:
        _launched(lowering, op)
        return
    axis = ir.IntegerAttr(op.attributes["axis"]).value
    lowering.set(op.results[0], lowering.grid_sizes[axis])
    lowering.keep_lazy()


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


def _grid_dependency(instruction: str) -> Callable[[Lowering, ir.Operation], None]:
    def lower(lowering: Lowering, op: ir.Operation) -> None:
        if lowering.target.has("pdl"):  # others start no kernel before the one ahead has ended
            lowering.asm(f"griddepcontrol.{instruction};", "~{memory}", [], [])

    return lower


RULES = {
    "mt.program_id": _special_register("ctaid"),
    "mt.num_programs": _num_programs,
    "mt.cta_id": _special_register("ctaid"),
    "mt.cta_count": _launched,
    "mt.hint": _hint,
    "mt.assume": _assume,
    "mt.barrier": _barrier,
    "mt.grid_wait": _grid_dependency("wait"),
    "mt.grid_launch": _grid_dependency("launch_dependents"),
}
