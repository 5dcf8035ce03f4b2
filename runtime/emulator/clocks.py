"""Vector clocks: what each warp knows of the accesses of the others.

The agents of a cluster (a CTA, if there are none), one column each, are its warps, the tensor cores
of its warpgroups (whose time is the number of the wgmma-group) and its synchronisation objects
(whose time is the number of completed phases: bytes that a TMA writes for an mbarrier belong to
that mbarrier's next phase).
"""

from __future__ import annotations

import numpy as np

_GROUP = 4  # warps of a warpgroup
BARRIERS = 16  # named barriers of a CTA


class Clocks:
    """The clocks of the warps of a chunk's clusters, and of the objects they meet at.

    A cluster is ``size`` CTAs of ``warps`` warps.
    """

    def __init__(self, clusters: int, warps: int, size: int = 1) -> None:
        self.size, self.warps = size, warps * size  # warps of a cluster
        groups = -(-warps // _GROUP)
        #: Agents that read memory: warps and tensor cores; columns of objects come after them.
        self.readers = self.warps + size * groups
        self.objects = 0
        number = np.arange(clusters * self.warps)
        #: By warp: its number in its cluster, that, its CTA's rank there, and its tensor core.
        self.local, self.cluster = number % self.warps, number // self.warps
        self.rank = self.local // warps
        self._tensor = self.warps + self.rank * groups + self.local % warps // _GROUP
        self.table = np.zeros((len(number), self.readers), np.int32)
        #: What each warp knew at its last fence, which relaxed arrivals pass on.
        self.at_fence = np.zeros_like(self.table)
        #: Per cluster and object, what arrived there, and what a waiter on its last phase learns.
        self.gathered = np.zeros((clusters, 0, self.readers), np.int32)
        self.published = self.gathered
        #: Per cluster and barrier of its CTAs, one CTA after the other: what was left there, and
        #: when each warp came, now and last time.
        self.meeting = np.zeros((clusters, size * BARRIERS, self.readers), np.int32)
        self.coming = np.zeros((clusters, size * BARRIERS, self.warps), np.int32)
        self.met = np.zeros_like(self.coming)
        self.tick(number)

    def tick(self, warps: np.ndarray) -> None:
        self.table[warps, self.local[warps]] += 1

    def own(self, warp: np.ndarray) -> np.ndarray:
        return self.known(warp, self.local[warp])

    def known(self, warp: np.ndarray, agent: np.ndarray) -> np.ndarray:
        """The latest time of ``agent`` (of the same cluster) that ``warp`` has heard of."""
        return self.table.reshape(-1).take(warp * self.table.shape[1] + agent)

    def tensor_agent(self, warp: np.ndarray) -> np.ndarray:
        """The agent that stands for the tensor cores of a warp's warpgroup."""
        return self._tensor[warp]

    def learn(self, warps: np.ndarray, agent: np.ndarray, time: np.ndarray) -> None:
        self.table[warps, agent] = np.maximum(self.table[warps, agent], time)

    # -- barriers
    def arrive(self, lanes: np.ndarray, barriers: np.ndarray) -> np.ndarray:
        """The warps of ``lanes`` leave what they know at barriers of their CTAs. Which of the lanes
        may come too early: their warp does not know that all others came to the last meeting."""
        warps, first = np.unique(lanes >> 5, return_index=True)
        place = self.cluster[warps], barriers[first] + BARRIERS * self.rank[warps]
        early = (self.met[place] > self.table[warps, : self.warps]).any(1)
        np.maximum.at(self.meeting, place, self.table[warps])
        self.coming[(*place, self.local[warps])] = self.own(warps)
        self.tick(warps)
        return np.isin(lanes >> 5, warps[early])

    def meet(self, ctas: np.ndarray, barrier: int, waiting: np.ndarray) -> None:
        """A barrier of some CTAs is complete: lanes that waited learn what all left there."""
        warps = np.unique(waiting >> 5)
        left = self.meeting[self.cluster[warps], barrier + BARRIERS * self.rank[warps]]
        self.table[warps] = np.maximum(self.table[warps], left)
        place = ctas // self.size, barrier + BARRIERS * (ctas % self.size)
        self.met[place] = self.coming[place]
        self.coming[place] = 0
        self.meeting[place] = 0

    # -- objects
    def add_object(self) -> int:
        """A new object in every cluster; returns its number."""
        self.table = np.pad(self.table, ((0, 0), (0, 1)))
        self.at_fence = np.pad(self.at_fence, ((0, 0), (0, 1)))
        self.gathered = np.pad(self.gathered, ((0, 0), (0, 1), (0, 1)))
        self.published = np.pad(self.published, ((0, 0), (0, 1), (0, 1)))
        self.meeting = np.pad(self.meeting, ((0, 0), (0, 0), (0, 1)))
        self.objects += 1
        return self.objects - 1

    def agent_of(self, thing: np.ndarray) -> np.ndarray:
        return self.readers + thing

    def fence(self, lanes: np.ndarray) -> None:
        """A releasing fence: what the warps know now is what their relaxed arrivals pass on."""
        warps = np.unique(lanes >> 5)
        self.at_fence[warps] = self.table[warps]
        self.tick(warps)

    def release(self, lanes: np.ndarray, thing: np.ndarray, fenced: bool = False) -> None:
        """The warps of ``lanes`` leave what they know (or knew at their last fence) at objects."""
        warps = lanes >> 5
        known = self.at_fence if fenced else self.table
        np.maximum.at(self.gathered, (self.cluster[warps], thing), known[warps])
        self.tick(np.unique(warps))

    def publish(self, cluster: np.ndarray, thing: np.ndarray, phases: np.ndarray) -> None:
        """Objects completed their phase number ``phases``: waiters learn what was gathered."""
        self.published[cluster, thing] = self.gathered[cluster, thing]
        self.published[cluster, thing, self.agent_of(thing)] = phases

    def acquire(self, lanes: np.ndarray, thing: np.ndarray) -> None:
        warps = lanes >> 5
        np.maximum.at(self.table, warps, self.published[self.cluster[warps], thing])
