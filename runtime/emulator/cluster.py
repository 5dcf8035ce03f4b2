"""The barrier of a cluster: barrier.cluster.arrive and .wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minitriton.runtime.emulator.barriers import require_whole_warps
from minitriton.runtime.emulator.checks import Deadlock
from minitriton.runtime.emulator.memory import error
from minitriton.runtime.emulator.module import Ins
from minitriton.runtime.emulator.operands import lanes_of


class ClusterBarrier:
    """The barrier of each cluster: arrive and wait apart, of all threads still alive."""

    def __init__(self, chunk: Any, size: int) -> None:
        self.c, self.size = chunk, size
        self.clusters = chunk.ctas // size
        self.cluster_of_lane = chunk.cta_of_lane // size
        self.arrived = np.zeros(chunk.L, bool)  # in the phase that is not complete
        self.owes_wait = np.zeros(chunk.L, bool)
        self.waiting = np.zeros(chunk.L, bool)
        self.thing = -1
        self.phases = np.zeros(self.clusters, np.int64)

    def arrive(self, ins: Ins, lanes: np.ndarray, releases: bool) -> None:
        c = self.c
        again = self.owes_wait[lanes]
        if again.any():
            message = "barrier.cluster.arrive twice without barrier.cluster.wait between"
            raise error(Deadlock, ins, c, lanes[again], message)
        self.arrived[lanes] = self.owes_wait[lanes] = True
        if c.race is not None and self.thing < 0:
            self.thing = c.race.clocks.add_object()
        if c.race is not None:
            if releases:
                c.race.release_to_cluster(lanes)
            c.race.clocks.release(lanes, np.full(len(lanes), self.thing), fenced=not releases)
        self.recheck()

    def recheck(self) -> None:
        """Complete the phases of the clusters whose live threads have all arrived."""
        c = self.c
        if not self.arrived.any():
            return
        missing = (c.live & ~self.arrived).reshape(self.clusters, -1).any(1)
        done = self.arrived.reshape(self.clusters, -1).any(1) & ~missing
        if not done.any():
            return
        c.progress += 1
        self.phases[done] += 1
        if c.race is not None:
            who = np.flatnonzero(done)
            c.race.clocks.publish(who, np.full(len(who), self.thing), self.phases[who])
        members = done[self.cluster_of_lane]
        self.arrived[members] = False
        lanes = np.flatnonzero(self.waiting & members)
        self.waiting[lanes] = False
        self._pass(lanes)
        c.unpark(lanes)

    def _pass(self, lanes: np.ndarray) -> None:
        self.owes_wait[lanes] = False
        if self.c.race is not None and len(lanes):
            self.c.race.clocks.acquire(lanes, np.full(len(lanes), self.thing))

    def wait(self, ins: Ins, lanes: np.ndarray) -> bool:
        c = self.c
        never = ~self.owes_wait[lanes]
        if never.any():
            message = "barrier.cluster.wait without barrier.cluster.arrive before it"
            raise error(Deadlock, ins, c, lanes[never], message)
        early = self.arrived[lanes]
        self._pass(lanes[~early])
        if not early.any():
            return True
        c.split()
        c.key[lanes[~early]] = ins.pc + 1
        self.waiting[lanes[early]] = True
        c.park(lanes[early], ins.pc, self)
        return False

    def describe(self, lane: int) -> str:
        c = self.c
        mine = self.cluster_of_lane == self.cluster_of_lane[lane]
        came, need = int((self.arrived & mine).sum()), int((c.live & mine).sum())
        return f"the cluster barrier: {came} of {need} threads arrived"


def barrier_cluster(ins: Ins) -> Callable[[Any, Any], bool]:
    """barrier.cluster.arrive and .wait; see `decode.Blocking`."""
    arrives, releases = "arrive" in ins.mods, "relaxed" not in ins.mods
    if not arrives and "wait" not in ins.mods:
        raise ins.unsupported()

    def run(c: Any, ix: Any) -> bool:
        lanes = lanes_of(c, ix)
        if "aligned" in ins.mods and "align" in c.checks:
            require_whole_warps(ins, c, lanes)
        if not arrives:
            return c.cluster.wait(ins, lanes)
        c.cluster.arrive(ins, lanes, releases)
        return True

    return run
