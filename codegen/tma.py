"""TMA copies into shared memory, the mbarriers that count their bytes, and copies out of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from math import prod

from minitriton.codegen.lower import Lowering, integer_attribute
from minitriton.codegen.shared_address import shared_word
from minitriton.ir.dialect import MemType
from minitriton.ir.mlir import ir

BARRIER_BYTES = 8
MAX_HOISTED = 4  # boxes of a copy whose coordinates are values, which LLVM keeps through a loop


def lower_tma_copy(lowering: Lowering, op: ir.Operation) -> None:
    buffer, barrier, runs, *coordinates = op.operands
    signal = shared_word(lowering, lowering.scalar(barrier))
    asks = lowering.and_(lowering.is_first_thread, lowering.scalar(runs))
    rank = len(coordinates)
    constraints = ",".join(["b", "r", "l", *["r"] * rank, "r", "~{memory}"])
    pointer = lowering.map_pointers[integer_attribute(op, "map")]
    boxes = boxes_of(lowering, op, buffer)
    if len(boxes) <= MAX_HOISTED:
        for at, corner in _placed(lowering, boxes, buffer, coordinates):
            lowering.asm(
                copy_text([0] * rank), constraints, [], [asks, at, pointer, *corner, signal]
            )
        return
    starts = [lowering.scalar(c) for c in coordinates]
    target = shared_word(lowering, lowering.scalar(buffer))
    for offset, steps in boxes:
        at = lowering.add(target, offset) if offset else target
        lowering.asm(copy_text(steps), constraints, [], [asks, at, pointer, *starts, signal])


def copy_text(steps: Sequence[int], *, multicast: bool = False) -> str:
    """A copy of the box whose first element is `steps` behind the given coordinates; multicast: to
    the CTAs of the mask that is the last operand."""
    rank = len(steps)
    names = [f"c{i}" if step else f"${3 + i}" for i, step in enumerate(steps)]
    sums = [
        f".reg .b32 c{i};\nadd.s32 c{i}, ${3 + i}, {step};\n"
        for i, step in enumerate(steps)
        if step
    ]
    kind, mask = (".multicast::cluster", f", ${4 + rank}") if multicast else ("", "")
    copy = (
        f"@$0 cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes"
        f"{kind} [$1], [$2, {{{', '.join(names)}}}], [${3 + rank}]{mask};"
    )
    return f"{{\n{''.join(sums)}{copy}\n}}" if sums else copy


def lower_tma_store(lowering: Lowering, op: ir.Operation) -> None:
    buffer, *coordinates = op.operands
    rank = len(coordinates)
    names = ", ".join(f"${3 + i}" for i in range(rank))
    text = (
        f"@$0 cp.async.bulk.tensor.{rank}d.global.shared::cta.bulk_group [$2, {{{names}}}], [$1];"
    )
    constraints = ",".join(["b", "r", "l", *["r"] * rank, "~{memory}"])
    asks = lowering.is_first_thread
    pointer = lowering.map_pointers[integer_attribute(op, "map")]
    for at, corner in _placed(lowering, boxes_of(lowering, op, buffer), buffer, coordinates):
        lowering.asm(text, constraints, [], [asks, at, pointer, *corner])
    lowering.asm("@$0 cp.async.bulk.commit_group;", "b,~{memory}", [], [asks])


def lower_tma_store_wait(lowering: Lowering, op: ir.Operation) -> None:
    kind = ".read" if "read" in op.attributes else ""
    pending = integer_attribute(op, "pending")
    text = f"@$0 cp.async.bulk.wait_group{kind} {pending};"
    lowering.asm(text, "b,~{memory}", [], [lowering.is_first_thread])


def boxes_of(lowering: Lowering, op: ir.Operation, buffer: ir.Value) -> list[tuple[int, list[int]]]:
    """(byte offset in the buffer, first element by dimension of the map) of each box of a tile.

    Boxes are narrower than the tile where its rows are wider than the swizzle, and lower where it
    has more rows than a box may have.
    """
    description = lowering.tensor_maps[integer_attribute(op, "map")]
    tile = MemType(buffer.type).tensor_type.shape
    places = list(ir.DenseI32ArrayAttr(op.attributes["dims"]))  # of the tile's dims in the map
    box = [description["box"][place] for place in places]
    size = prod(box) * description["element_bytes"]
    found = []
    for number, corner in enumerate(_corners(tile, box, places.index(0))):
        steps = [0] * len(description["box"])
        for dim, place in enumerate(places):
            steps[place] = corner[dim]
        found.append((number * size, steps))
    return found


def _placed(
    lowering: Lowering, boxes: Sequence[tuple[int, list[int]]], buffer: ir.Value,
    coordinates: Sequence[ir.Value],
) -> Iterator[tuple[ir.Value, list[ir.Value]]]:  # fmt: skip
    """(shared address, coordinates of the first element) of boxes."""
    target = shared_word(lowering, lowering.scalar(buffer))
    starts = [lowering.scalar(c) for c in coordinates]
    for offset, steps in boxes:
        pairs = zip(starts, steps, strict=True)
        moved = [lowering.add(start, step) if step else start for start, step in pairs]
        yield lowering.add(target, offset) if offset else target, moved


def _corners(tile: list[int], box: list[int], inner: int) -> list[list[int]]:
    """First elements of the boxes in the order in which they lie in memory: panel by panel."""
    steps = [range(0, extent, step) for extent, step in zip(tile, box, strict=True)]
    panels, rows = steps[inner], [s for dim, s in enumerate(steps) if dim != inner]
    found = []
    for first, *others in itertools.product(panels, *rows):
        corner = list(others)
        corner.insert(inner, first)
        found.append(corner)
    return found


def lower_mbarrier_init(lowering: Lowering, op: ir.Operation) -> None:
    count = integer_attribute(op, "count")
    _each_barrier(lowering, op, f"mbarrier.init.shared::cta.b64 [$1], {count};")
    lowering.asm("fence.mbarrier_init.release.cluster;", "~{memory}", [])


def lower_mbarrier_inval(lowering: Lowering, op: ir.Operation) -> None:
    _each_barrier(lowering, op, "mbarrier.inval.shared::cta.b64 [$1];")


def _each_barrier(lowering: Lowering, op: ir.Operation, text: str) -> None:
    first = shared_word(lowering, lowering.scalar(op.operands[0]))
    count = prod(MemType(op.operands[0].type).tensor_type.shape)
    for number in range(count):
        at = lowering.add(first, number * BARRIER_BYTES) if number else first
        lowering.asm(f"@$0 {text}", "b,r,~{memory}", [], [lowering.is_first_thread, at])


def lower_mbarrier_expect(lowering: Lowering, op: ir.Operation) -> None:
    barrier, runs = op.operands
    asks = lowering.and_(lowering.is_first_thread, lowering.scalar(runs))
    count = integer_attribute(op, "bytes")
    lowering.asm(
        f"@$0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], {count};",
        "b,r,~{memory}", [], [asks, shared_word(lowering, lowering.scalar(barrier))],
    )  # fmt: skip


def lower_mbarrier_wait(lowering: Lowering, op: ir.Operation) -> None:
    barrier, parity = map(lowering.scalar, op.operands)
    lowering.asm(
        "{\n.reg .pred done;\nWAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;\n"
        "@done bra DONE;\nbra WAIT;\nDONE:\n}",
        "r,r,~{memory}", [], [shared_word(lowering, barrier), parity],
    )  # fmt: skip


RULES = {
    "mt.tma_copy": lower_tma_copy,
    "mt.tma_store": lower_tma_store,
    "mt.tma_store_wait": lower_tma_store_wait,
    "mt.mbarrier_init": lower_mbarrier_init,
    "mt.mbarrier_inval": lower_mbarrier_inval,
    "mt.mbarrier_expect": lower_mbarrier_expect,
    "mt.mbarrier_wait": lower_mbarrier_wait,
}
