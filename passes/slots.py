"""Multi-buffers in shared memory and the mbarriers of their slots."""

from __future__ import annotations

from minitriton.ir.builder import Builder, i32_attr
from minitriton.ir.encoding import mem_type
from minitriton.ir.linear_layout import LinearLayout
from minitriton.ir.mlir import ir
from minitriton.passes.traversal import Value


def allocate_slots(
    count: int, slot: LinearLayout, element: ir.Type, alignment: int, builder: Builder
) -> Value:
    """A buffer of `count` slots whose users order their accesses themselves; alignment in bytes."""
    attributes: dict[str, ir.Attribute] = {"mt.pipelined": ir.UnitAttr.get()}
    if alignment > 1:
        attributes["mt.alignment"] = i32_attr(alignment)
    whole = mem_type([count, *slot.shape], element, slot)
    return builder.op("mt.local_alloc", whole, (), attributes)


def _barrier_layout() -> LinearLayout:
    return LinearLayout.shared((1,), ())


def allocate_barriers(count: int, arrivals: int, builder: Builder) -> Value:
    """`count` mbarriers of so many arrivals each, initialised by thread 0."""
    i64 = ir.IntegerType.get_signless(64)
    made = allocate_slots(count, _barrier_layout(), i64, 1, builder)
    builder.create("mt.mbarrier_init", [], [made], {"count": i32_attr(arrivals)})
    return made


def barrier_at(barriers: Value, slot: Value, builder: Builder) -> Value:
    """The mbarrier of slot number `slot`."""
    type_ = mem_type([1], ir.IntegerType.get_signless(64), _barrier_layout())
    return builder.op("mt.mem_index", type_, [barriers, slot])
