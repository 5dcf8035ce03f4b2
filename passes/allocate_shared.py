"""Gives every shared-memory buffer and scratch area its place, by liveness.

    before: mt.local_alloc, mt.convert_layout     after: the same with mt.offset = bytes : i32,
                                                  module attribute mt.shared_bytes : i32

Where warps part into several groups (`ping_pong`), what is allocated after that exists once for
each, mt.group_bytes apart. Requires: layouts. Ensures: areas whose lives overlap do not overlap in
memory. Small scratch areas, such as those of reductions, share memory with nothing: reuse would
take a barrier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minitriton.ir.builder import i32_attr
from minitriton.ir.diagnostics import Diagnostic, Note, SharedMemoryExceeded
from minitriton.ir.mlir import ir
from minitriton.ir.target import Target
from minitriton.ir.warp_roles import GROUP_BYTES, GROUPS
from minitriton.passes.op_classes import LOOPS
from minitriton.passes.shared_usage import buffer_bytes, scratch_of
from minitriton.passes.source_span import span_of
from minitriton.passes.tile_pass import PassOptions
from minitriton.passes.traversal import Value, blocks_of, int_attribute, kernel_of, ops_of

BUFFER_ALIGNMENT = 128  # a whole row of banks, so that swizzles fall where they were planned
OWN_SCRATCH = 512  # bytes in all of scratch areas that share memory with nothing
OWN_ALIGNMENT = 16  # of those: they are read in vectors


@dataclass(frozen=True)
class Area:
    """Memory needed from program point `first` to `last`, both included."""

    bytes: int
    first: int
    last: int
    alignment: int = BUFFER_ALIGNMENT


def run(module: ir.Module, target: Target, options: PassOptions) -> None:
    """Adds mt.offset and mt.shared_bytes; SharedMemoryExceeded where the target has too little."""
    function = kernel_of(module)
    owners, areas, points = _areas(function)
    arranged = _arrange(areas, _parting(function, points))
    for op, offset in zip(owners, arranged.offsets, strict=True):
        op.attributes["mt.offset"] = i32_attr(offset)
    total = arranged.total
    if arranged.each:
        module.operation.attributes[GROUP_BYTES] = i32_attr(arranged.each)
    alignment = max((a.alignment for a in areas), default=0)
    if alignment > BUFFER_ALIGNMENT:
        module.operation.attributes["mt.shared_alignment"] = i32_attr(alignment)
    module.operation.attributes["mt.shared_bytes"] = i32_attr(total)
    if total > target.max_shared_bytes:
        raise _too_large(total, target, owners, areas)


def bytes_with(
    function: ir.Operation, more: Sequence[tuple[ir.Operation, ir.Operation, int]], alignment: int,
    without: Sequence[ir.Operation] = (),
) -> int:  # fmt: skip
    """Shared memory that the kernel will need with further buffers, (first op, last op, bytes),
    once the ops in `without` are gone."""
    owners, areas, points = _areas(function)
    areas = [area for op, area in zip(owners, areas, strict=True) if op not in without]
    areas += [Area(n, points[first][0], points[last][1], alignment) for first, last, n in more]
    return _arrange(areas, _parting(function, points)).total


@dataclass(frozen=True)
class _Arranged:
    """Where areas are; `each`: bytes that every group of warps has for itself, 0 if there is one;
    offsets of those are the first group's."""

    offsets: list[int]
    total: int
    each: int = 0


@dataclass(frozen=True)
class _Parting:
    """The program point where warps part into `groups`, each with memory of its own."""

    point: int
    groups: int


def _parting(
    function: ir.Operation, points: dict[ir.Operation, tuple[int, int]]
) -> _Parting | None:
    groups = int_attribute(function.parent.operation, GROUPS, 1)
    splits = [op for op in points if op.name == "mt.split_warps"] if groups > 1 else []
    return _Parting(points[splits[0]][0], groups) if splits else None


def _arrange(areas: Sequence[Area], parting: _Parting | None) -> _Arranged:
    if parting is None:
        offsets = place(areas)
        return _Arranged(offsets, _end(areas, offsets, 16))
    shared = [area for area in areas if area.first < parting.point]
    own = [area for area in areas if area.first > parting.point]
    alignment = max((area.alignment for area in areas), default=16)
    places = place(shared), place(own)
    start, each = (
        _end(found, offsets, alignment)
        for found, offsets in zip((shared, own), places, strict=True)
    )
    first, second = (iter(offsets) for offsets in places)
    offsets = [next(first) if a.first < parting.point else start + next(second) for a in areas]
    return _Arranged(offsets, start + parting.groups * each, each)


def _end(areas: Sequence[Area], offsets: Sequence[int], alignment: int) -> int:
    ends = (offset + area.bytes for offset, area in zip(offsets, areas, strict=True))
    return _aligned(max(ends, default=0), alignment)


def place(areas: Sequence[Area]) -> list[int]:
    """An offset for each area: largest first, each at the lowest place free during its life."""
    offsets = [0] * len(areas)
    placed: list[int] = []
    for index in sorted(range(len(areas)), key=lambda i: (-areas[i].bytes, areas[i].first)):
        area = areas[index]
        taken = sorted(
            (offsets[other], offsets[other] + areas[other].bytes)
            for other in placed
            if areas[other].first <= area.last and area.first <= areas[other].last
        )
        offset = 0
        for start, end in taken:
            if offset + area.bytes <= start:
                break
            offset = max(offset, _aligned(end, area.alignment))
        offsets[index] = offset
        placed.append(index)
    return offsets


def _aligned(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def _areas(
    function: ir.Operation,
) -> tuple[list[ir.Operation], list[Area], dict[ir.Operation, tuple[int, int]]]:
    """Every op that needs memory, and what it needs; the program points of all ops."""
    points: dict[ir.Operation, tuple[int, int]] = {}
    order: list[ir.Operation] = []
    _number(function, points, order)
    owners, areas = [], []
    own, parting = OWN_SCRATCH, _parting(function, points)
    for op in order:
        first = points[op][0]
        if op.name == "mt.local_alloc":
            last = _last_use(op, op.results[0], points)
            owners.append(op)
            alignment = int_attribute(op, "mt.alignment", BUFFER_ALIGNMENT)
            size = buffer_bytes(op.results[0].type)
            areas.append(Area(size, first, max(first, last), alignment))
            continue
        scratch = scratch_of(op)
        if scratch is not None:
            owners.append(op)
            if scratch.bytes <= own:
                own -= scratch.bytes
                start = parting.point + 1 if parting and first > parting.point else 0
                areas.append(Area(scratch.bytes, start, len(order), OWN_ALIGNMENT))
            else:
                areas.append(Area(scratch.bytes, first, first))
    return owners, areas, points


def _number(
    parent: ir.Operation, points: dict[ir.Operation, tuple[int, int]], order: list[ir.Operation]
) -> None:
    """Program points (of the op, of its end); reduce and scan regions hold no memory ops."""
    for block in blocks_of(parent):
        for op in ops_of(block):
            first = len(order)
            order.append(op)
            if op.name.startswith("scf."):
                _number(op, points, order)
            points[op] = (first, len(order) - 1)


def _last_use(
    alloc: ir.Operation, value: Value, points: dict[ir.Operation, tuple[int, int]]
) -> int:
    """Last program point at which the buffer is needed: a use in a loop lasts to the loop's end."""
    last = 0
    for use in value.uses:
        user = use.owner.operation
        for result in user.results:
            if user.name in ("mt.mem_index", "mt.mem_trans"):
                last = max(last, _last_use(alloc, result, points))
        point, around = points[user][1], user
        while around.block != alloc.block:
            around = around.parent.operation
            if around.name in LOOPS:
                point = points[around][1]
        last = max(last, point)
    return last


def _too_large(
    total: int, target: Target, owners: Sequence[ir.Operation], areas: Sequence[Area]
) -> SharedMemoryExceeded:
    largest = sorted(zip(areas, owners, strict=True), key=lambda pair: -pair[0].bytes)[:8]
    notes = tuple(
        Note(f"{area.bytes:>8} bytes for {op.name}", span_of(op.location)) for area, op in largest
    )
    return SharedMemoryExceeded(
        Diagnostic(
            f"the kernel needs {total} bytes of shared memory, "
            f"{target.arch} has {target.max_shared_bytes} per CTA",
            span_of(largest[0][1].location),
            "the largest user",
            "use smaller tiles or fewer num_stages",
            notes,
        )
    )
