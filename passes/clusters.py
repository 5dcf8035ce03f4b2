"""Clusters of two CTAs, whose programs, side by side, share the copies that both would make.

    before: mbarrier_init %empty {8}; barrier; split_warps
            for %p { for { wait %empty; expect; tma_copy %a; tma_copy %b; ...; arrive %empty } }
    after:  mbarrier_init %empty {16}; cluster_barrier; split_warps
            for %p { %same = coordinates of %p == those of %p ^ 1
                     for { wait %empty; expect; tma_multicast %b if %same; ...;
                           arrive %empty of both } }
            cluster_barrier

Where the coordinates are equal (`neighbours`), each CTA copies one half of the tile into the memory
of both; elsewhere all of it for itself. So a slot is free when the warps of both CTAs have read it.
Both run equally many iterations: persistent kernels only, whose programs are of equal length, and
of which the launcher starts an even number of programs and CTAs.
Requires: barriers are placed, what the producer copies is marked. Ensures: mt.num_ctas is how many
CTAs a cluster has, 1 where a kernel cannot use two; remarks say why.
Source: CUTLASS's multicast pipelines, as described in its documentation.
"""

from __future__ import annotations

import json

from minitriton.ir.builder import Builder, i32_attr
from minitriton.ir.dialect import MemType
from minitriton.ir.mlir import ir
from minitriton.ir.target import Target
from minitriton.ir.tensor_map_specs import ATTRIBUTE, read_specs
from minitriton.ir.warp_roles import ALL_WARPS, PRODUCER
from minitriton.passes import persist
from minitriton.passes.global_order import PROGRAMS
from minitriton.passes.neighbours import Neighbours, NotShared
from minitriton.passes.remarks import add_remark
from minitriton.passes.shared_usage import buffer_of
from minitriton.passes.tile_pass import PassOptions
from minitriton.passes.traversal import (
    attributes_of,
    int_array,
    int_attribute,
    kernel_of,
    ops_of,
    terminator_of,
    walk,
)

NUM_CTAS = "mt.num_ctas"
SWIZZLE_ROWS = 8  # a box begins where the swizzle does


def run(module: ir.Module, target: Target, options: PassOptions) -> None:
    """Makes CTAs share copies if the kernel asks for clusters and some can be shared."""
    top, function = module.operation, kernel_of(module)
    if int_attribute(top, NUM_CTAS, 1) == 1:
        return
    reason = _refusal(module, target)
    if reason is None:
        emptied = _share(module)
        if emptied:
            _count_both(function, emptied)
            _meet(function)
            return
        reason = "neighbouring programs share no copies"
    add_remark(module, function, f"num_ctas 2 reduced to 1: {reason}")
    top.attributes[NUM_CTAS] = i32_attr(1)


def _refusal(module: ir.Module, target: Target) -> str | None:
    """Why the CTAs of a kernel stay alone."""
    if not target.has("cluster"):
        return f"{target.arch} has no clusters"
    if "mt.producer_warps" not in module.operation.attributes:
        return "no loop has a producer warp"
    if persist.ATTRIBUTE not in module.operation.attributes:
        return "programs may differ in length, or wait for each other"
    return None


def _share(module: ir.Module) -> set[ir.Operation]:
    """Replaces the copies that two programs may share; the barriers of `empty` slots behind them.

    Tiles that are copied once for a loop, in rings of one slot, stay each program's own."""
    function = kernel_of(module)
    (programs,) = [op for op in walk(function) if PROGRAMS in op.attributes]
    neighbours = Neighbours(programs)
    emptied = set()
    for copy in [op for op in walk(function) if op.name == "mt.tma_copy"]:
        if PRODUCER not in copy.attributes or _slots(copy) == 1:
            continue
        buffer, barrier, runs, *coordinates = copy.operands
        try:
            dim = _halved(module, copy)
            same = neighbours.equal(coordinates, copy)
        except NotShared as reason:
            add_remark(module, copy, f"not shared in a cluster: {reason}")
            continue
        builder = Builder(ir.InsertionPoint(copy), copy.location)
        attributes = attributes_of(copy) | {"halved": i32_attr(dim)}
        operands = [buffer, barrier, runs, same, *coordinates]
        builder.create("mt.tma_multicast", [], operands, attributes)
        emptied.add(buffer_of(_wait_before(copy).operands[0]))
        text = "clusters of 2: programs side by side share this copy where its coordinates agree"
        add_remark(module, copy, text)
        copy.erase()
    return emptied


def _slots(copy: ir.Operation) -> int:
    """Of the ring that a copy goes through."""
    barriers = buffer_of(copy.operands[1]).results[0].type
    return int(MemType(barriers).tensor_type.shape[0])


def _wait_before(copy: ir.Operation) -> ir.Operation:
    """The producer's wait for the slot that it copies to."""
    ops = ops_of(copy.block)
    waits = [
        op
        for op in ops[: ops.index(copy)]
        if op.name == "mt.mbarrier_wait" and PRODUCER in op.attributes
    ]
    return waits[-1]


def _halved(module: ir.Module, copy: ir.Operation) -> int:
    """The dimension of a copy's tile along which its boxes fall into halves; where there is an odd
    number of them, they are made half as high.

    Raises NotShared.
    """
    specs = read_specs(module.operation)
    box = specs[int_attribute(copy, "map")]["box"]
    tile = MemType(copy.operands[0].type).tensor_type.shape
    places = int_array(copy, "dims")
    inner = places.index(0)
    for dim in sorted(range(len(tile)), key=lambda dim: dim != inner):
        if tile[dim] // box[places[dim]] % 2 == 0:
            return dim
    rows = [dim for dim in range(len(tile)) if dim != inner]
    if len(rows) != 1 or box[places[rows[0]]] % (2 * SWIZZLE_ROWS):
        raise NotShared("its tile has no halves")
    box[places[rows[0]]] //= 2
    module.operation.attributes[ATTRIBUTE] = ir.StringAttr.get(json.dumps(specs))
    return rows[0]


def _count_both(function: ir.Operation, emptied: set[ir.Operation]) -> None:
    """The warps of both CTAs arrive at these barriers, at their own and at the neighbour's."""
    for op in walk(function):
        if op.name == "mt.mbarrier_init" and buffer_of(op.operands[0]) in emptied:
            op.attributes["count"] = i32_attr(2 * int_attribute(op, "count"))
        elif op.name == "mt.mbarrier_arrive" and buffer_of(op.operands[0]) in emptied:
            op.attributes["cluster"] = ir.UnitAttr.get()


def _meet(function: ir.Operation) -> None:
    """Before warps part, all barriers of both CTAs are ready; before a CTA ends, the other one does
    nothing to its memory any more."""
    (first,) = [
        op for op in walk(function) if op.name == "mt.barrier" and ALL_WARPS in op.attributes
    ]
    end = terminator_of(function.regions[0].blocks[0])
    for place, marks in ((first, (ALL_WARPS, "relaxed")), (end, (ALL_WARPS,))):
        builder = Builder(ir.InsertionPoint(place), place.location)
        attributes = dict.fromkeys(marks, ir.UnitAttr.get())
        builder.create("mt.cluster_barrier", [], [], attributes)
    first.erase()
