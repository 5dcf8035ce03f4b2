"""Vector clocks: what each warp knows of the accesses of the others.

The agents of a CTA, one column each, are its warps, the tensor cores of its warpgroups (whose
time is the number of the wgmma-group) and its synchronisation objects (whose time is the number of
completed phases: bytes that a TMA writes for an mbarrier belong to that mbarrier's next phase).
"""

from __future__ import annotations

import numpy as np

_GROUP = 4  # warps of a warpgroup
BARRIERS = 16  # named barriers of a CTA


class Clocks:
    """The clocks of the warps of a chunk's CTAs, and of the objects they meet at."""

    def __init__(self, ctas: int, warps: int) -> None:
        self.ctas, self.warps = ctas, warps
        #: Agents that read memory: warps and tensor cores; columns of objects come after them.
        self.readers = warps + -(-warps // _GROUP)
        self.objects = 0
        self.local = np.arange(ctas * warps) % warps
        self.cta = np.arange(ctas * warps) // warps
        self.table = np.zeros((ctas * warps, self.readers), np.int32)
        #: Per CTA and object, what arrived there, and what a waiter on its last phase learns.
        self.gathered = np.zeros((ctas, 0, self.readers), np.int32)
        self.published = self.gathered
        #: Per CTA and barrier: what was left there, and when each warp came, now and last time.
        self.meeting = np.zeros((ctas, BARRIERS, self.readers), np.int32)
        self.coming = np.zeros((ctas, BARRIERS, warps), np.int32)
        self.met = np.zeros_like(self.coming)
        self.tick(np.arange(ctas * warps))

    def tick(self, warps: np.ndarray) -> None:
        self.table[warps, self.local[warps]] += 1

    def own(self, warp: np.ndarray) -> np.ndarray:
        return self.known(warp, self.local[warp])

    def known(self, warp: np.ndarray, agent: np.ndarray) -> np.ndarray:
        """The latest time of ``agent`` (of the same CTA) that ``warp`` has heard of."""
        return self.table.reshape(-1).take(warp * self.table.shape[1] + agent)

    def tensor_agent(self, warp: np.ndarray) -> np.ndarray:
        """The agent that stands for the tensor cores of a warp's warpgroup."""
        return self.warps + self.local[warp] // _GROUP

    def learn(self, warps: np.ndarray, agent: np.ndarray, time: np.ndarray) -> None:
        self.table[warps, agent] = np.maximum(self.table[warps, agent], time)

    # -- barriers
    def arrive(self, lanes: np.ndarray, barriers: np.ndarray) -> np.ndarray:
        """The warps of ``lanes`` leave what they know at barriers of their CTAs. Which of the lanes
        may come too early: their warp does not know that all others came to the last meeting."""
        warps, first = np.unique(lanes >> 5, return_index=True)
        place = self.cta[warps], barriers[first]
        early = (self.met[place] > self.table[warps, : self.warps]).any(1)
        np.maximum.at(self.meeting, place, self.table[warps])
        self.coming[(*place, self.local[warps])] = self.own(warps)
        self.tick(warps)
        return np.isin(lanes >> 5, warps[early])

    def meet(self, ctas: np.ndarray, barrier: int, waiting: np.ndarray) -> None:
        """A barrier of some CTAs is complete: lanes that waited learn what all left there."""
        warps = np.unique(waiting >> 5)
        self.table[warps] = np.maximum(self.table[warps], self.meeting[self.cta[warps], barrier])
        self.met[ctas, barrier] = self.coming[ctas, barrier]
        self.coming[ctas, barrier] = 0
        self.meeting[ctas, barrier] = 0

    # -- objects
    def add_object(self) -> int:
        """A new object in every CTA; returns its number."""
        self.table = np.pad(self.table, ((0, 0), (0, 1)))
        self.gathered = np.pad(self.gathered, ((0, 0), (0, 1), (0, 1)))
        self.published = np.pad(self.published, ((0, 0), (0, 1), (0, 1)))
        self.meeting = np.pad(self.meeting, ((0, 0), (0, 0), (0, 1)))
        self.objects += 1
        return self.objects - 1

    def agent_of(self, thing: np.ndarray) -> np.ndarray:
        return self.readers + thing

    def release(self, lanes: np.ndarray, thing: np.ndarray) -> None:
        """The warps of ``lanes`` leave what they know at objects of their CTAs."""
        warps = lanes >> 5
        np.maximum.at(self.gathered, (self.cta[warps], thing), self.table[warps])
        self.tick(np.unique(warps))

    def publish(self, cta: np.ndarray, thing: np.ndarray, phases: np.ndarray) -> None:
        """Objects completed their phase number ``phases``: waiters learn what was gathered."""
        self.published[cta, thing] = self.gathered[cta, thing]
        self.published[cta, thing, self.agent_of(thing)] = phases

    def acquire(self, lanes: np.ndarray, thing: np.ndarray) -> None:
        warps = lanes >> 5
        np.maximum.at(self.table, warps, self.published[self.cta[warps], thing])
