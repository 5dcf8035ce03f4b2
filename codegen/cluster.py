"""Clusters of two CTAs: their barrier, arrivals at mbarriers of both, copies to both."""

from __future__ import annotations

from minitriton.codegen.lower import Lowering, integer_attribute
from minitriton.codegen.shared_address import shared_word
from minitriton.codegen.tma import boxes_of, copy_text
from minitriton.ir.dialect import MemType
from minitriton.ir.mlir import ir

NUM_CTAS = 2
BOTH = (1 << NUM_CTAS) - 1  # mask of a multicast copy


def lower_tma_multicast(lowering: Lowering, op: ir.Operation) -> None:
    """One half for both CTAs where it is shared, else all boxes for this one: none hoisted, as the
    producer has few registers."""
    buffer, barrier, runs, shared, *coordinates = op.operands
    asks = lowering.and_(lowering.is_first_thread, lowering.scalar(runs))
    both = lowering.and_(asks, lowering.scalar(shared))
    alone = lowering.and_(asks, lowering.xor(lowering.scalar(shared), 1))
    pointer = lowering.map_pointers[integer_attribute(op, "map")]
    signal = shared_word(lowering, lowering.scalar(barrier))
    target = shared_word(lowering, lowering.scalar(buffer))
    starts = [lowering.scalar(c) for c in coordinates]
    boxes = boxes_of(lowering, op, buffer)
    dim = integer_attribute(op, "halved")
    place = list(ir.DenseI32ArrayAttr(op.attributes["dims"]))[dim]
    half = MemType(buffer.type).tensor_type.shape[dim] // 2
    further = min(offset for offset, steps in boxes if steps[place] >= half)  # in bytes
    own = list(starts)
    own[place] = lowering.add(own[place], lowering.mul(cluster_rank(lowering), half))
    part = lowering.add(target, lowering.mul(cluster_rank(lowering), further))
    constraints = ["b", "r", "l", *["r"] * len(starts), "r"]
    mask = lowering.constant(lowering.i16, BOTH)
    for offset, steps in boxes:
        if steps[place] < half:
            operands = [both, lowering.add(part, offset), pointer, *own, signal, mask]
            text = copy_text(steps, multicast=True)
            lowering.asm(text, ",".join([*constraints, "h", "~{memory}"]), [], operands)
    for offset, steps in boxes:
        operands = [alone, lowering.add(target, offset), pointer, *starts, signal]
        lowering.asm(copy_text(steps), ",".join([*constraints, "~{memory}"]), [], operands)


def lower_cluster_barrier(lowering: Lowering, op: ir.Operation) -> None:
    lowering.asm("bar.warp.sync 0xffffffff;", "~{memory}", [])  # a producer's lanes may have parted
    how = "relaxed" if "relaxed" in op.attributes else "release"  # mbarriers have their own fence
    lowering.asm(f"barrier.cluster.arrive.{how}.aligned;", "~{memory}", [])
    lowering.asm("barrier.cluster.wait.acquire.aligned;", "~{memory}", [])


def cluster_rank(lowering: Lowering) -> ir.Value:
    """i32, 0 or 1: which CTA of its cluster this is."""
    register = "nvvm.read.ptx.sreg.cluster.ctarank"
    return lowering.once(register, lambda: lowering.op(register, lowering.i32))


def arrive_in_cluster(lowering: Lowering, barrier: ir.Value, runs: ir.Value) -> None:
    """A warp arrives at the mbarriers at this address in both CTAs: lane r in CTA r.

    Without a scope, as the warp has only read what the barrier guards (measured on an H200: with
    `.release.cluster` ptxas adds a fence of the whole GPU, which costs 20 % of a product)."""

    def far() -> ir.Value:
        """What is between an address of this CTA and the same of CTA number lane % 2."""
        base = shared_word(lowering, lowering.shared_base)
        rank = lowering.and_(lowering.lane_id, NUM_CTAS - 1)
        (mapped,) = lowering.asm(
            "mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r", [lowering.i32], [base, rank],
            effects=False,
        )  # fmt: skip
        return lowering.binary("subi", mapped, base)

    distance = lowering.once("distance in cluster", far)
    reaches = lowering.once(
        "first lanes", lambda: lowering.compare("ult", lowering.lane_id, NUM_CTAS)
    )
    lowering.asm("bar.warp.sync 0xffffffff;", "~{memory}", [])
    lowering.asm(
        "@$0 mbarrier.arrive.shared::cluster.b64 _, [$1];",
        "b,r,~{memory}", [], [lowering.and_(reaches, runs), lowering.add(barrier, distance)],
    )  # fmt: skip


RULES = {
    "mt.cluster_barrier": lower_cluster_barrier,
    "mt.tma_multicast": lower_tma_multicast,
}
