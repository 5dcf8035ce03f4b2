"""Where warps part: one thread of the producer warps copies, the others hold the tiles.

setmaxnreg moves registers from the producers to the others, whole warpgroups at a time. A barrier
of the others has a number of its own, and counts them alone.
"""

from __future__ import annotations

from minitriton.codegen.cluster import arrive_in_cluster
from minitriton.codegen.lower import CONSUMER_BARRIER, Lowering, Role, integer_attribute
from minitriton.codegen.shared_address import shared_word
from minitriton.codegen.warpgroup import warpgroup
from minitriton.ir.diagnostics import InternalError
from minitriton.ir.mlir import ir
from minitriton.ir.warp_roles import CONSUMER_REGISTERS, ENDS, PRODUCER_REGISTERS

WARPGROUP = 4  # warps


def lower_split_warps(lowering: Lowering, op: ir.Operation) -> None:
    """Everything that follows in the block, once for each role; at the end what all do."""
    if lowering.groups > 1:
        lowering.group_id = warpgroup(lowering)
    ops = [view.operation for view in op.block.operations]
    rest = ops[ops.index(op) + 1 : -1]
    ends = [op for op in rest if op.name == "mt.cluster_barrier"]
    rest = [op for op in rest if op not in ends]
    first_group = lowering.consumer_warps // WARPGROUP
    is_producer = lowering.compare("eq", warpgroup(lowering), first_group)

    def produce() -> list[ir.Value]:
        _set_registers(lowering, "dec", PRODUCER_REGISTERS)
        chosen = lowering.compare("eq", lowering.thread_id, 32 * lowering.consumer_warps)
        lowering.branch(chosen, (), copy, list)
        return []

    def copy() -> list[ir.Value]:
        lowering.role = Role.PRODUCER
        if lowering.producer is None:
            raise InternalError("codegen", "the producer's function is missing")
        body = lowering.producer.regions[0].blocks[0]
        lowering.inline(body, [lowering.value(a) for a in op.block.arguments])
        lowering.role = Role.ALL
        return []

    def consume() -> list[ir.Value]:
        _set_registers(lowering, "inc", CONSUMER_REGISTERS[_warpgroups(lowering)])
        lowering.role = Role.CONSUMERS
        lowering.lower_ops(rest)
        lowering.role = Role.ALL
        return []

    lowering.branch(is_producer, (), produce, consume)
    lowering.lower_ops(ends)


def _set_registers(lowering: Lowering, how: str, count: int) -> None:
    lowering.asm(f"setmaxnreg.{how}.sync.aligned.u32 {count};", "", [])


def lower_mbarrier_arrive(lowering: Lowering, op: ir.Operation) -> None:
    barrier, runs = map(lowering.scalar, op.operands)
    if "cluster" in op.attributes:
        arrive_in_cluster(lowering, shared_word(lowering, barrier), runs)
        return
    first = lowering.once("first lane", lambda: lowering.compare("eq", lowering.lane_id, 0))
    lowering.asm("bar.warp.sync 0xffffffff;", "~{memory}", [])
    lowering.asm(
        "@$0 mbarrier.arrive.shared::cta.b64 _, [$1];",
        "b,r,~{memory}", [], [lowering.and_(first, runs), shared_word(lowering, barrier)],
    )  # fmt: skip


def lower_turn_wait(lowering: Lowering, op: ir.Operation) -> None:
    own = lowering.add(warpgroup(lowering), _first_turn(lowering, op))
    _turn(lowering, op, "sync", own)


def lower_turn_pass(lowering: Lowering, op: ir.Operation) -> None:
    own, first, last = warpgroup(lowering), _first_turn(lowering, op), _warpgroups(lowering) - 1
    if last == 1:
        following = lowering.binary("subi", lowering.int32(first + last), own)
    else:
        after = lowering.add(own, first + 1)
        is_last = lowering.compare("eq", own, last)
        following = lowering.select(is_last, lowering.int32(first), after)
    _turn(lowering, op, "arrive", following)


def _warpgroups(lowering: Lowering) -> int:
    """Those that hold tiles."""
    return lowering.consumer_warps // WARPGROUP


def _first_turn(lowering: Lowering, op: ir.Operation) -> int:
    """The number of the first barrier for turns, one for each warpgroup, after the groups' own;
    those for the ends of programs come after them."""
    first = CONSUMER_BARRIER + lowering.groups
    return first + _warpgroups(lowering) if ENDS in op.attributes else first


def _turn(lowering: Lowering, op: ir.Operation, how: str, number: ir.Value) -> None:
    """One warpgroup waits at its barrier, the one before it only arrives there."""

    def meet() -> list[ir.Value]:
        lowering.asm(f"bar.{how} $0, {2 * 32 * WARPGROUP};", "r,~{memory}", [], [number])
        return []

    if "mt.group" not in op.attributes:
        meet()
        return
    group = integer_attribute(op, "mt.group")
    lowering.branch(lowering.compare("eq", warpgroup(lowering), group), (), meet, list)


def lower_group_id(lowering: Lowering, op: ir.Operation) -> None:
    produces = lowering.role is Role.PRODUCER
    lowering.set(op.results[0], lowering.int32(0) if produces else lowering.group_id)


def lower_group_count(lowering: Lowering, op: ir.Operation) -> None:
    produces = lowering.role is Role.PRODUCER
    lowering.set(op.results[0], lowering.int32(1 if produces else lowering.groups))


RULES = {
    "mt.group_id": lower_group_id,
    "mt.group_count": lower_group_count,
    "mt.split_warps": lower_split_warps,
    "mt.mbarrier_arrive": lower_mbarrier_arrive,
    "mt.turn_wait": lower_turn_wait,
    "mt.turn_pass": lower_turn_pass,
}
