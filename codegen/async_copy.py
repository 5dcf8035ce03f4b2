"""cp.async: copies from global memory into a shared buffer that run beside the threads."""

from __future__ import annotations

from collections.abc import Sequence

from minitriton.codegen.emit import attribute, width_of
from minitriton.codegen.lower import Lowering, integer_attribute
from minitriton.codegen.memory import operand_list, to_words, vector_suffix
from minitriton.codegen.shared_address import (
    MAX_ACCESS_BYTES,
    ThreadAddress,
    meet,
    shared_word,
    thread_mask_is_clear,
    writers,
)
from minitriton.codegen.tile import carried
from minitriton.ir.axis_analysis import mask_of
from minitriton.ir.conversion import storage_bits
from minitriton.ir.diagnostics import InternalError
from minitriton.ir.encoding import mem_layout
from minitriton.ir.linear_layout import LinearLayout
from minitriton.ir.mlir import ir
from minitriton.ir.shared_access import SharedAccessPlan, shared_access_plan

MIN_COPY_BYTES = 4


def lower_async_copy(lowering: Lowering, op: ir.Operation) -> None:
    pointers, buffer = lowering.tile(op.operands[0]), op.operands[1]
    plan = _plan(lowering, op, pointers.layout)
    elem_bytes = plan.elem_bits // 8
    size = plan.vec * elem_bytes
    mask = mask_of(op)
    masks = None if mask is None else lowering.tile(mask).registers
    address = ThreadAddress(
        lowering, lowering.scalar(buffer), plan.lane_bases, plan.warp_bases, elem_bytes, plan.gaps
    )
    if masks is not None and len(op.operands) > 3:
        _copy_or_fill(lowering, plan, address, pointers.registers, masks, op.operands[3])
        return
    copies = []
    for group in plan.groups:
        head = group.registers[0]
        operands = [address.at(group.offset), pointers.registers[head]]
        if masks is not None:  # copies no bytes where masked off, and fills up with zeros
            operands.append(lowering.select(masks[head], lowering.int32(size), lowering.int32(0)))
        copies.append(operands)
    clear = thread_mask_is_clear(lowering, plan.free_lane_mask, plan.free_warp_mask)
    if clear is not None and _is_beside_products(op):
        for place, *others in copies:
            _copy_where(lowering, clear, size, [shared_word(lowering, place), *others])
        return
    attributes = {
        "size": ir.IntegerAttr.get(lowering.i32, size),
        "modifier": attribute(f"#nvvm<load_cache_modifier {_modifier(size)}>"),
    }
    with writers(lowering, plan.free_lane_mask, plan.free_warp_mask):
        for operands in copies:
            lowering.create("nvvm.cp.async.shared.global", [], operands, attributes)


def _is_beside_products(op: ir.Operation) -> bool:
    """Whether wgmma may be in flight there: next to a branch ptxas would wait for it (C7513)."""
    return any(other.operation.name == "mt.warpgroup_dot" for other in op.block)


def _copy_where(
    lowering: Lowering, condition: ir.Value, size: int, operands: Sequence[ir.Value]
) -> None:
    """Predicated. Operands: place (a shared address), pointer, perhaps how many bytes there are."""
    count = len(operands)
    given = ", $2" if count > 2 else ""
    text = f"@${count} cp.async.{_modifier(size)}.shared.global [$0], [$1], {size}{given};"
    letters = "r,l,r"[: 2 * count - 1]
    lowering.asm(text, f"{letters},b,~{{memory}}", [], [*operands, condition])


def _copy_or_fill(
    lowering: Lowering,
    plan: SharedAccessPlan,
    address: ThreadAddress,
    pointers: Sequence[ir.Value],
    masks: Sequence[ir.Value],
    other: ir.Value,
) -> None:
    """Copies where the mask holds, and stores `other` where it does not."""
    size = plan.vec * plan.elem_bits // 8
    words = max(1, size // 4)
    copy = f"@$2 cp.async.{_modifier(size)}.shared.global [$0], [$1], {size};"
    fill = f"@!$1 st.shared{vector_suffix(words)}.b32 [$0], {operand_list(range(2, 2 + words))};"
    with writers(lowering, plan.free_lane_mask, plan.free_warp_mask):
        for group in plan.groups:
            head = group.registers[0]
            place = shared_word(lowering, address.at(group.offset))
            operands = [place, pointers[head], masks[head]]
            lowering.asm(copy, "r,l,b,~{memory}", [], operands)
            values = [lowering.registers(other)[r] for r in group.registers]
            data = to_words(lowering, values, lowering.i32)
            lowering.asm(
                fill, "r,b," + ",".join("r" * words) + ",~{memory}", [], [place, masks[head], *data]
            )


def _modifier(size: int) -> str:
    """16-byte copies may bypass L1, which a tile that goes to shared memory has no use for."""
    return "cg" if size == MAX_ACCESS_BYTES else "ca"


def _plan(lowering: Lowering, op: ir.Operation, layout: LinearLayout) -> SharedAccessPlan:
    """Accesses that are vectors both in shared and in global memory."""
    buffer = op.operands[1].type
    shared = mem_layout(buffer)
    bits = storage_bits(width_of(carried(buffer.tensor_type.element_type)))
    dim, run = _contiguous_run(shared)
    limit = min(run, lowering.axis.access_limits(op)[dim], MAX_ACCESS_BYTES * 8 // bits)
    plan = shared_access_plan(shared, layout, bits, limit * bits)
    if plan.vec * bits < MIN_COPY_BYTES * 8:
        raise InternalError(
            "codegen", f"async_copy of {plan.vec * bits // 8} bytes per access at {op.location}"
        )
    return plan


def _contiguous_run(shared: LinearLayout) -> tuple[int, int]:
    """(dimension, elements along it) that lie one after the other in shared memory."""
    vectors = dict(shared.bases)["offset"]
    dim = max(range(shared.rank), key=lambda d: vectors[0][d] if vectors else 0)
    run = 1
    for vector in vectors:
        if any(c != run * (d == dim) for d, c in enumerate(vector)):
            break
        run *= 2
    return dim, run


def lower_async_commit(lowering: Lowering, op: ir.Operation) -> None:
    lowering.create("nvvm.cp.async.commit.group", [])


def lower_async_wait(lowering: Lowering, op: ir.Operation) -> None:
    pending = ir.IntegerAttr.get(lowering.i32, integer_attribute(op, "pending"))
    lowering.create("nvvm.cp.async.wait.group", [], (), {"n": pending})
    if "of_warp" in op.attributes:
        meet(lowering, warp_local=True)


RULES = {
    "mt.async_copy": lower_async_copy,
    "mt.async_commit": lower_async_commit,
    "mt.async_wait": lower_async_wait,
}
