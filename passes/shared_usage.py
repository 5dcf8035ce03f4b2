"""What each op does with shared memory: its buffers and its own scratch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from minitriton.ir.conversion import SharedRoundTrip, plan_conversion, storage_bits
from minitriton.ir.dialect import MemType, element_of, shape_of
from minitriton.ir.encoding import layout_of, mem_layout
from minitriton.ir.mlir import ir
from minitriton.ir.ragged import extent
from minitriton.ir.reduction import plan_reduction, plan_scan
from minitriton.ir.types import bit_width
from minitriton.passes.traversal import Value, defining_op, int_attribute

SHARED_RESERVE = 2048  # bytes that pipelining leaves for scratch inside its loop
SCALAR_BROADCAST_BYTES = 16  # a scalar atomic hands its result from one thread to all


@dataclass(frozen=True)
class Scratch:
    """Shared memory that only one op uses; `barrier`: all warps meet inside the op."""

    bytes: int
    barrier: bool


def element_bytes(type_: ir.Type) -> int:
    """Bytes that an element of a scalar or tile type takes in shared memory."""
    return storage_bits(bit_width(element_of(type_))) // 8


def buffer_bytes(type_: ir.Type) -> int:
    """Size of a `!mt.mem` buffer with all its slots."""
    tensor, slot = MemType(type_).tensor_type, mem_layout(type_)
    count = prod(tensor.shape) // prod(slot.shape)
    return count * extent(slot) * element_bytes(tensor)


def _convert(op: ir.Operation) -> Scratch | None:
    source, result = op.operands[0].type, op.results[0].type
    bits = bit_width(element_of(result))
    plan = plan_conversion(layout_of(source), layout_of(result), bits)
    if isinstance(plan, SharedRoundTrip):
        return Scratch(plan.bytes, not plan.warp_local)
    return None


def _reduce(op: ir.Operation) -> Scratch | None:
    types = [v.type for v in op.operands]
    sizes = tuple(map(element_bytes, types))
    plan = plan_reduction(layout_of(types[0]), int_attribute(op, "axis"), sizes)
    return Scratch(plan.scratch_bytes, True) if plan.scratch_bytes else None


def _scan(op: ir.Operation) -> Scratch | None:
    types = [v.type for v in op.operands]
    sizes = tuple(map(element_bytes, types))
    reverse = ir.BoolAttr(op.attributes["reverse"]).value
    plan = plan_scan(layout_of(types[0]), int_attribute(op, "axis"), sizes, reverse)
    return Scratch(plan.scratch_bytes, True) if plan.scratch_bytes else None


def _gather(op: ir.Operation) -> Scratch | None:
    source = op.operands[0].type
    return Scratch(prod(source.shape) * element_bytes(source), True)


def _histogram(op: ir.Operation) -> Scratch | None:
    result = op.results[0].type
    return Scratch(prod(result.shape) * element_bytes(result), True)


def _atomic(op: ir.Operation) -> Scratch | None:
    """The old value reaches threads that repeat the element of another one through memory."""
    result = op.results[0]
    if not any(True for _ in result.uses):
        return None
    if shape_of(result.type) is None:
        return Scratch(SCALAR_BROADCAST_BYTES, True)
    layout = layout_of(result.type)
    if layout.free_bits("lane") or layout.free_bits("warp"):
        return Scratch(prod(layout.hulls) * element_bytes(result.type), True)
    return None


_SCRATCH: dict[str, Callable[[ir.Operation], Scratch | None]] = {
    "mt.convert_layout": _convert,
    "mt.reduce": _reduce,
    "mt.scan": _scan,
    "mt.gather": _gather,
    "mt.histogram": _histogram,
    "mt.atomic_rmw": _atomic,
    "mt.atomic_cas": _atomic,
}


def scratch_of(op: ir.Operation) -> Scratch | None:
    """The scratch that `op` needs; None for an op that works in registers."""
    rule = _SCRATCH.get(op.name)
    return rule(op) if rule else None


VIEWS = frozenset(("mt.mem_index", "mt.mem_trans"))


def buffer_of(value: Value) -> ir.Operation:
    """The mt.local_alloc behind a `!mt.mem` value."""
    op = defining_op(value)
    while op is not None and op.name in VIEWS:
        op = defining_op(op.operands[0])
    assert op is not None and op.name == "mt.local_alloc", "buffers are not loop-carried"
    return op


def buffer_accesses(op: ir.Operation) -> list[tuple[ir.Operation, bool]]:
    """(mt.local_alloc, writes?) for each buffer that `op` touches."""
    match op.name:
        case "mt.local_alloc":
            return [(op, True)] if len(op.operands) else []
        case "mt.local_load" | "mt.tma_store":
            return [(buffer_of(op.operands[0]), False)]
        case "mt.warpgroup_dot":
            return [
                (buffer_of(v), False) for v in list(op.operands)[:2] if isinstance(v.type, MemType)
            ]
        case "mt.local_store" | "mt.async_copy":
            return [(buffer_of(op.operands[1]), True)]
        case "mt.tma_copy":
            return [(buffer_of(op.operands[0]), True)]
        case "mt.mbarrier_init" | "mt.mbarrier_inval":
            return [(buffer_of(op.operands[0]), True)]
    return []
