"""CTA barriers: bar/barrier[.cta] .sync, .arrive and .red on 16 named barriers per CTA.

Arrivals are counted in lanes, warp by warp as PTX does: a warp that arrives whole counts 32 even
if some of its lanes have exited. A barrier without a count expects every warp still alive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minitriton.runtime.emulator.checks import Deadlock, DivergentAligned
from minitriton.runtime.emulator.clocks import BARRIERS
from minitriton.runtime.emulator.memory import error
from minitriton.runtime.emulator.module import Ins
from minitriton.runtime.emulator.operands import lanes_of, reader, writer


class CtaBarriers:
    """State of the named barriers of a chunk's CTAs."""

    def __init__(self, chunk: Any) -> None:
        self.c = chunk
        shape = (chunk.ctas, BARRIERS)
        self.arrived = np.zeros(shape, np.int64)
        self.expected = np.zeros(shape, np.int64)  # 0: all live warps
        self.waiting = np.full(chunk.L, -1, np.int64)  # barrier number per parked lane
        self.taking_part = np.zeros((BARRIERS, chunk.L), bool)
        self.flags = np.zeros(chunk.L, bool)  # operand of .red per lane
        self.busy = 0

    def arrive(
        self, ins: Ins, lanes: np.ndarray, ids: np.ndarray, counts: np.ndarray | None
    ) -> np.ndarray:
        """Count ``lanes`` in; returns the mask [ctas, 16] of barriers that completed."""
        c = self.c
        cta = c.cta_of_lane[lanes]
        if (ids >= BARRIERS).any():
            raise error(Deadlock, ins, c, lanes, f"barrier number {int(ids.max())} (limit 15)")
        weight = c.arrival_weight(lanes)
        np.add.at(self.arrived, (cta, ids), weight)
        if counts is not None:
            known = self.expected[cta, ids]
            clash = (known != 0) & (known != counts)
            if clash.any():
                k = int(np.flatnonzero(clash)[0])
                message = (
                    f"barrier {int(ids[k])} is used with counts {int(known[k])} and "
                    f"{int(counts[k])} at the same time"
                )
                raise error(Deadlock, ins, c, lanes[clash], message)
            self.expected[cta, ids] = counts
        if c.race is not None:
            early = c.race.barrier_arrive(lanes, ids)
            if early.any():
                number = int(ids[np.flatnonzero(early)[0]])
                message = f"barrier {number} is used again while others may not have passed it"
                hint = "wait for them before the next bar.arrive, at another barrier"
                raise error(Deadlock, ins, c, lanes[early], message, hint)
        self.taking_part[ids, lanes] = True
        self.busy += 1
        return self.completed()

    def completed(self) -> np.ndarray:
        live = self.c.live_warp_lanes()
        need = np.where(self.expected > 0, self.expected, live[:, None])
        return (self.arrived >= need) & (self.arrived > 0)

    def release(self, done: np.ndarray) -> np.ndarray:
        """Reset the barriers in ``done`` and return the parked lanes they free."""
        c = self.c
        freed = np.zeros(c.L, bool)
        for number in np.flatnonzero(done.any(0)):
            in_cta = done[:, number][c.cta_of_lane]
            parked = (self.waiting == number) & in_cta
            if c.race is not None:
                ctas = np.flatnonzero(done[:, number])
                c.race.barrier_complete(ctas, int(number), np.flatnonzero(parked))
            freed |= parked
            self.taking_part[number] &= ~in_cta
        self.arrived[done] = 0
        self.expected[done] = 0
        lanes = np.flatnonzero(freed)
        self.waiting[lanes] = -1
        self.busy = int((self.arrived > 0).sum())
        return lanes

    def recheck(self) -> None:
        """After lanes exited: barriers that were waiting only for them complete."""
        if self.busy:
            done = self.completed()
            if done.any():
                self.wake(done, None)

    def wake(self, done: np.ndarray, own: np.ndarray | None) -> bool:
        """Free everyone in ``done``; True when all ``own`` lanes are among the freed."""
        c = self.c
        members = self.taking_part.copy() if c.reducing else None
        lanes = self.release(done)
        if members is not None:
            _finish_reductions(c, lanes, members, done, self.flags)
        c.progress += 1
        stay = lanes if own is None else np.setdiff1d(lanes, own, assume_unique=True)
        c.unpark(stay)
        return own is not None and len(lanes) - len(stay) == len(own)

    def describe(self, lane: int) -> str:
        """What a parked lane is waiting for."""
        c, number = self.c, int(self.waiting[lane])
        cta = int(c.cta_of_lane[lane])
        need = int(self.expected[cta, number]) or int(c.live_warp_lanes()[cta])
        return f"barrier {number}: {int(self.arrived[cta, number])} of {need} threads arrived"


def barrier(ins: Ins) -> Callable[[Any, Any], bool]:
    """bar.sync, barrier.cta.sync, .arrive and .red; see `decode.Blocking`."""
    kind = next((m for m in ins.mods if m in ("sync", "arrive", "red")), None)
    if kind is None or "cluster" in ins.mods:
        raise ins.unsupported()
    operands = list(ins.ops)
    dest = operands.pop(0) if kind == "red" else None
    predicate = operands.pop() if kind == "red" else None
    read_id = reader(ins, operands[0], 32)
    read_count = reader(ins, operands[1], 32) if len(operands) > 1 else None
    if kind == "arrive" and read_count is None:
        raise ins.unsupported("arrive needs a thread count")
    aligned = ins.op == "bar" or "aligned" in ins.mods
    read_flag = reader(ins, predicate, 1) if predicate is not None else None
    if kind == "red":
        mode = next(m for m in ins.mods if m in ("popc", "and", "or"))
        reduction = (mode, writer(ins, dest, 32 if mode == "popc" else 1))

    def arrive(c: Any, ix: Any) -> bool:
        lanes = lanes_of(c, ix)
        if aligned and "align" in c.checks:
            require_whole_warps(ins, c, lanes)
        state: CtaBarriers = c.barriers
        ids = np.broadcast_to(read_id(c, ix), lanes.shape).astype(np.int64)
        counts = None
        if read_count is not None:
            counts = np.broadcast_to(read_count(c, ix), lanes.shape).astype(np.int64)
        if read_flag is not None:
            state.flags[lanes] = read_flag(c, ix)
            c.reducing[ins.pc] = reduction
        done = state.arrive(ins, lanes, ids, counts)
        if kind == "arrive":
            if done.any():
                state.wake(done, None)
            return True
        state.waiting[lanes] = ids
        if done.any():
            if read_flag is not None:
                c.lane_pc[lanes] = ins.pc
            mine = done[c.cta_of_lane[lanes], ids]
            if mine.all():
                return state.wake(done, lanes) or True
        c.park(lanes, ins.pc, state)
        if done.any():
            state.wake(done, None)
        return False

    return arrive


def require_whole_warps(ins: Ins, c: Any, lanes: np.ndarray) -> None:
    present = np.bincount(lanes >> 5, minlength=c.L >> 5)
    partial = (present > 0) & (present != c.live_in_warp())
    if partial.any():
        bad = lanes[partial[lanes >> 5]]
        hint = "move the barrier out of the divergent branch, or use barrier.cta without .aligned"
        message = "an aligned barrier is executed by part of a warp"
        raise error(DivergentAligned, ins, c, bad, message, hint)


def _finish_reductions(
    c: Any, lanes: np.ndarray, members: np.ndarray, done: np.ndarray, flags: np.ndarray
) -> None:
    for number in np.flatnonzero(done.any(0)):
        for cta in np.flatnonzero(done[:, number]):
            group = np.flatnonzero(members[number] & (c.cta_of_lane == cta))
            total = int(flags[group].sum())
            values = {"popc": total, "and": total == len(group), "or": total > 0}
            waiting = np.intersect1d(lanes, group, assume_unique=True)
            for pc in np.unique(c.lane_pc[waiting]):
                if int(pc) in c.reducing:
                    mode, write = c.reducing[int(pc)]
                    write(c, waiting[c.lane_pc[waiting] == pc], values[mode])
