"""Shared-memory races: two warps touch a word, one writes, and nothing orders them.

Happens-before by vector clocks (clocks.py). Each granule of shared memory remembers its last write
(agent, clock) and per agent the clock of its last read. Copies in flight (cp.async, TMA) conflict
with every access until they land, bulk stores with every write until their source has been read.
Writes of the value that is there already are benign.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minitriton.runtime.emulator.checks import SharedRace
from minitriton.runtime.emulator.clocks import Clocks
from minitriton.runtime.emulator.memory import CARRIER, SHIFT, error
from minitriton.runtime.emulator.module import Ins

_HINT = "a bar.sync must order the two accesses"
_TENSOR_HINT = "wait with wgmma.wait_group and then a barrier before the bytes are written"
_FENCE_HINT = "fence.proxy.async must stand between the write and the barrier before {reader}"
_INIT_HINT = "fence.mbarrier_init (or fence.proxy.async) must follow mbarrier.init"
_FLIGHT_HINT = "wait with cp.async.wait_group and then a barrier before touching the bytes"
_BULK_HINT = "wait for the phase of the mbarrier that the copy completes"
_STORE_HINT = (
    "wait with cp.async.bulk.wait_group.read and then a barrier before the bytes are written"
)
_RELEASE_HINT = "a release at the scope of the cluster, or a barrier.cluster, must follow the write"
_END_HINT = "all CTAs must pass a barrier.cluster after the last such access"
_CHUNK = 4  # log2 of the bytes that wgmma and bulk copies move together


class RaceDetector:
    """Clocks and shadow memory of one chunk."""

    def __init__(self, chunk: Any) -> None:
        self.c = chunk
        ctas, granule, size = chunk.ctas, chunk.launch.granule, chunk.grid.size
        self.clocks = Clocks(ctas // size, chunk.padded // 32, size)
        self.warps = self.clocks.warps  # of a cluster
        self.shift = SHIFT[granule]
        self.per_cta = chunk.shared.stride >> self.shift
        size = ctas * self.per_cta
        self.write_agent = np.zeros(size, np.int32)
        self.write_clock = np.zeros(size, np.int32)
        self.write_pc = np.zeros(size, np.int32)
        self.reads = np.zeros((size, self.clocks.readers), np.int32)
        self.read_pc = np.zeros(size, np.int32)
        #: In clusters, the last read by a warp of another CTA.
        self.remote_pc = np.zeros(size, np.int32) if chunk.grid.size > 1 else None
        #: Per warp, the clock up to which other CTAs of its cluster may see its writes.
        self.released = np.zeros(chunk.L >> 5, np.int32)
        self.in_flight = np.zeros(size, bool)
        self.flying = False
        self.atomic_write = np.zeros(size, bool)
        self.scratch = np.zeros(size, np.int32)
        #: Bulk stores that still read a 16-byte chunk.
        self.store_reads = np.zeros((size >> _CHUNK - self.shift) + 1, np.int32)
        self.storing = False
        #: Per warp, the clock up to which async units see its writes, and its mbarrier.init.
        self.fenced = np.zeros(chunk.L >> 5, np.int32)
        self.init_fenced = np.zeros(chunk.L >> 5, np.int32)

    def _cells(self, lanes: Any, at: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
        """(warp of chunk, granule) of every granule touched, flattened granule-major."""
        lanes = self.c.all_lanes if lanes is None else lanes
        warp = np.broadcast_to(lanes >> 5, at.shape)
        first = at >> self.shift
        count = max(1, n >> self.shift)
        if count == 1:
            return warp, first
        cells = first[None, :] + np.arange(count)[:, None]
        return np.broadcast_to(warp, cells.shape).reshape(-1), cells.reshape(-1)

    def _chunk_cells(self, lanes: np.ndarray, chunks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`_cells` of 16-byte chunks at arena offsets [lanes, n]."""
        owners = np.broadcast_to(lanes[:, None], chunks.shape)
        return self._cells(owners.reshape(-1), chunks.reshape(-1), 1 << _CHUNK)

    def read(self, ins: Ins, c: Any, ix: Any, at: np.ndarray, n: int) -> None:
        """Check and record plain reads of n bytes at arena offsets ``at``."""
        warp, cell = self._cells(ix, at, n)
        self._check_flight(ins, warp, cell, "read")
        self._check_writes(ins, warp, cell, "read", None)
        self._record_read(ins, warp, cell)

    def _record_read(self, ins: Ins, warp: np.ndarray, cell: np.ndarray) -> None:
        place = cell * self.reads.shape[1] + self.clocks.local[warp]
        self.reads.reshape(-1)[place] = self.clocks.own(warp)
        self.read_pc[cell] = ins.pc
        if self.remote_pc is not None:
            self.remote_pc[cell[cell // self.per_cta != self.c.cta_of_lane[warp << 5]]] = ins.pc

    def write(
        self, ins: Ins, c: Any, ix: Any, at: np.ndarray, n: int, value: np.ndarray | None
    ) -> None:
        """Check and record plain writes; ``value`` (not yet stored) excuses equal writes."""
        warp, cell = self._cells(ix, at, n)
        changed = None if value is None else self._changed(at, n, value)
        self._check_flight(ins, warp, cell, "write")
        self._check_writes(ins, warp, cell, "write", changed)
        self._check_reads(ins, warp, cell, changed)
        self._check_same_instruction(ins, ix, at, n, value, warp, cell)
        self._record_write(ins, warp, cell)
        self.atomic_write[cell] = False

    def _changed(self, at: np.ndarray, n: int, value: np.ndarray) -> np.ndarray | None:
        """Which granules the write would alter, in the order of `_cells`."""
        old = self.c.shared.views[n].take(at >> SHIFT[n])
        new = np.ascontiguousarray(np.broadcast_to(value, at.shape)).view(CARRIER[n])
        granule = min(n, 1 << self.shift)
        parts = CARRIER[granule]
        a, b = old.view(parts).reshape(len(at), -1), new.view(parts).reshape(len(at), -1)
        return (a != b).T.reshape(-1)

    def _record_write(self, ins: Ins, warp: np.ndarray, cell: np.ndarray) -> None:
        self.write_agent[cell] = self.clocks.local[warp]
        self.write_clock[cell] = self.clocks.own(warp)
        self.write_pc[cell] = ins.pc

    def atomic(self, ins: Ins, c: Any, lanes: np.ndarray, at: np.ndarray, n: int) -> None:
        """Atomics conflict with plain accesses but not with one another."""
        warp, cell = self._cells(lanes, at, n)
        self._check_flight(ins, warp, cell, "atomic")
        plain = ~self.atomic_write[cell]
        if plain.any():
            self._check_writes(ins, warp[plain], cell[plain], "atomic", None)
        self._check_reads(ins, warp, cell, None)
        self._record_write(ins, warp, cell)
        self.atomic_write[cell] = True

    # -- checks
    def _check_flight(self, ins: Ins, warp: np.ndarray, cell: np.ndarray, verb: str) -> None:
        if not self.flying:
            return
        bad = self.in_flight[cell]
        if bad.any():
            pc = int(self.write_pc[cell[bad.argmax()]])
            hint = _BULK_HINT if self._is_bulk(pc) else _FLIGHT_HINT
            self._report(ins, warp, cell, bad, verb, "copy in flight", self.write_pc, hint)

    def _is_bulk(self, pc: int) -> bool:
        return "bulk" in self.c.launch.program.code[pc].mods

    def _check_writes(
        self, ins: Ins, warp: np.ndarray, cell: np.ndarray, verb: str, changed: Any
    ) -> None:
        # A cell nobody wrote has clock 0, which everybody knows; a warp knows its own clock.
        known = self.clocks.known(warp, self.write_agent.take(cell))
        bad = self.write_clock.take(cell) > known
        if changed is not None:
            bad &= changed
        if bad.any():
            copied = self.write_agent[cell[bad.argmax()]] >= self.clocks.readers
            what, hint = ("bulk copy", _BULK_HINT) if copied else ("write", _HINT)
            self._report(ins, warp, cell, bad, verb, what, self.write_pc, hint)
        if self.remote_pc is not None and verb == "read":
            self._check_released(ins, warp, cell)

    def _check_released(self, ins: Ins, warp: np.ndarray, cell: np.ndarray) -> None:
        """Other CTAs see a thread's writes only after a release at the scope of the cluster."""
        writer, cta = self.write_agent.take(cell), self.c.cta_of_lane
        mine = self.clocks.cluster[warp] * self.warps + np.minimum(writer, self.warps - 1)
        bad = (writer < self.warps) & (cta[mine << 5] != cta[warp << 5])
        bad &= self.write_clock.take(cell) > self.released[mine]
        if bad.any():
            what = "write that was not released to the cluster"
            self._report(ins, warp, cell, bad, "read", what, self.write_pc, _RELEASE_HINT)

    def _check_reads(
        self, ins: Ins, warp: np.ndarray, cell: np.ndarray, changed: Any, verb: str = "write"
    ) -> None:
        late = self.reads[cell] > self.clocks.table[:, : self.clocks.readers][warp]
        bad = late.any(1)
        if changed is not None:
            bad &= changed
        if bad.any():
            product = late[bad.argmax(), self.warps :].any()
            what, hint = ("wgmma in flight", _TENSOR_HINT) if product else ("read", _HINT)
            self._report(ins, warp, cell, bad, verb, what, self.read_pc, hint)
        if self.storing:
            bad = self.store_reads[cell >> _CHUNK - self.shift] > 0
            if changed is not None:
                bad &= changed
            if bad.any():
                what = "bulk store in flight"
                self._report(ins, warp, cell, bad, verb, what, self.read_pc, _STORE_HINT)

    def _check_fenced(
        self, ins: Ins, warp: np.ndarray, cell: np.ndarray, verb: str, reader: str
    ) -> None:
        """An asynchronous unit sees a thread's writes only after a proxy fence of that thread."""
        writer = self.write_agent.take(cell)
        mine = self.clocks.cluster[warp] * self.warps + np.minimum(writer, self.warps - 1)
        bad = (writer < self.warps) & (self.write_clock.take(cell) > self.fenced[mine])
        if bad.any():
            what, hint = "write that no fence.proxy.async followed", _FENCE_HINT
            self._report(
                ins, warp, cell, bad, verb, what, self.write_pc, hint.format(reader=reader)
            )

    def _check_same_instruction(
        self, ins: Ins, ix: Any, at: np.ndarray, n: int, value: Any, warp: Any, cell: Any
    ) -> None:
        """Two lanes writing different values to one place at once."""
        order = np.arange(len(at), dtype=np.int32)
        place = at >> self.shift
        self.scratch[place] = order
        winner = self.scratch[place]
        clash = winner != order
        if not clash.any():
            return
        if value is not None:
            new = np.ascontiguousarray(np.broadcast_to(value, at.shape))
            parts = new.view(np.uint64 if n > 8 else new.dtype).reshape(len(at), -1)
            clash &= (parts != parts[winner]).any(1) & (at == at[winner])
        if clash.any():
            rows = len(cell) // len(at)
            everywhere = np.tile(clash, rows)
            self._report(ins, warp, cell, everywhere, "write", "write by another lane", None)

    def _report(
        self,
        ins: Ins,
        warp: np.ndarray,
        cell: np.ndarray,
        bad: np.ndarray,
        verb: str,
        other: str,
        pcs: np.ndarray | None,
        hint: str = _HINT,
    ) -> None:
        k = int(np.flatnonzero(bad)[0])
        code = self.c.launch.program.code
        rival = code[int(pcs[cell[k]])] if pcs is not None else ins
        cta, offset = divmod(int(cell[k]), self.per_cta)
        offset <<= self.shift
        place = ""
        if cta != self.c.cta_of_lane[warp[k] * 32]:
            place = f" of CTA {self.c.cta_name(cta)}"
        where = f"PTX line {rival.line}"
        if rival.loc:
            where = f"{rival.loc[0]}:{rival.loc[1]}:{rival.loc[2]} ({where})"
        message = (
            f"{verb} of shared memory{place} at offset {offset:#x} is not ordered after the "
            f"{other} at {where}; {int(bad.sum())} words affected"
        )
        lanes = np.unique(warp[bad]) * 32
        raise error(
            SharedRace, ins, self.c, lanes, message, hint,
            offset=offset, other_line=rival.line, other_location=rival.loc,
        )  # fmt: skip

    # -- ordering
    def barrier_arrive(self, lanes: np.ndarray, barriers: np.ndarray) -> np.ndarray:
        """``lanes`` come to barriers of their CTAs; which of them may come too early."""
        return self.clocks.arrive(lanes, barriers)

    def barrier_complete(self, ctas: np.ndarray, barrier: int, waiting: np.ndarray) -> None:
        """A barrier of some CTAs is complete; lanes that only arrived there learn nothing."""
        self.clocks.meet(ctas, barrier, waiting)

    def warp_sync(self, lanes: np.ndarray) -> None:
        """bar.warp.sync orders lanes of one warp, which are one agent here."""

    def proxy_fence(self, lanes: np.ndarray) -> None:
        """What these warps wrote, copies that have landed included, is visible to async units."""
        warps = np.unique(lanes >> 5)
        self.fenced[warps] = self.clocks.own(warps)
        self.clocks.tick(warps)

    def init_fence(self, lanes: np.ndarray) -> None:
        """The mbarriers that these warps initialised are visible to async units."""
        warps = np.unique(lanes >> 5)
        self.init_fenced[warps] = self.clocks.own(warps)
        self.clocks.fence(lanes)

    def release_fence(self, lanes: np.ndarray) -> None:
        """What these warps know goes with their relaxed arrivals."""
        self.release_to_cluster(lanes)
        self.clocks.fence(lanes)

    def release_to_cluster(self, lanes: np.ndarray) -> None:
        """Other CTAs may see the writes that these warps know of."""
        if self.remote_pc is not None:
            warps = np.unique(lanes >> 5)
            known = self.clocks.table[warps, : self.warps]
            np.maximum.at(self.released.reshape(-1, self.warps), self.clocks.cluster[warps], known)

    def ended(self, ctas: np.ndarray) -> None:
        """CTAs of clusters end: every access of others must come before the end of a warp."""
        assert self.remote_pc is not None
        clocks, width = self.clocks, self.c.padded >> 5
        for cta in ctas:
            warps = np.arange(cta * width, (cta + 1) * width)
            known = clocks.table[warps].max(0)
            others = np.flatnonzero(clocks.rank[: self.warps] != clocks.rank[warps[0]])
            cells = np.arange(cta * self.per_cta, (cta + 1) * self.per_cta)
            writer = self.write_agent[cells]
            watched = np.isin(writer, others) | (writer >= clocks.readers)  # or bulk copies
            late = watched & (self.write_clock[cells] > known[writer])
            if late.any():
                self._outlived(cta, int(writer[late][0]), self.write_pc[cells[late][0]])
            late = self.reads[np.ix_(cells, others)] > known[others]
            if late.any():
                k, j = np.argwhere(late)[0]
                self._outlived(cta, int(others[j]), self.remote_pc[cells[k]])

    def _outlived(self, cta: int, agent: int, pc: int) -> None:
        warp = int(cta) * (self.c.padded >> 5)
        if agent < self.warps:
            warp = int(cta) // self.clocks.size * self.warps + agent
        ins, lane = self.c.launch.program.code[int(pc)], warp * 32
        name = self.c.cta_name(int(cta))
        message = f"CTA {name} may end before this access to its shared memory is over"
        raise error(SharedRace, ins, self.c, [lane], message, _END_HINT)

    # -- mbarriers
    def object_made(self, ins: Ins, lanes: np.ndarray, at: np.ndarray) -> None:
        """mbarrier.init and .inval: writes of the object's 8 bytes."""
        self.write(ins, self.c, lanes, at, 8, None)

    def object_used(self, ins: Ins, lanes: np.ndarray, at: np.ndarray, by_copy: bool) -> None:
        """Any other operation must come after the initialisation, but in no order among them."""
        warp, cell = self._cells(lanes, at, 8)
        self._check_writes(ins, warp, cell, "use of an mbarrier", None)
        if by_copy:
            mine = self.clocks.cluster[warp] * self.warps + self.write_agent.take(cell)
            seen = np.maximum(self.fenced[mine], self.init_fenced[mine])
            bad = self.write_clock.take(cell) > seen
            if bad.any():
                what, verb = "mbarrier.init that no fence followed", "use of an mbarrier"
                self._report(ins, warp, cell, bad, verb, what, self.write_pc, _INIT_HINT)
        self._record_read(ins, warp, cell)

    # -- cp.async
    def issue_async(self, ins: Ins, c: Any, lanes: np.ndarray, at: np.ndarray, n: int) -> None:
        warp, cell = self._cells(lanes, at, n)
        self._check_flight(ins, warp, cell, "copy")
        self._check_writes(ins, warp, cell, "copy", None)
        self._check_reads(ins, warp, cell, None)
        self._record_write(ins, warp, cell)
        self.in_flight[cell] = self.flying = True
        self.atomic_write[cell] = False

    def land_async(self, lanes: np.ndarray, at: np.ndarray, n: int) -> None:
        """The issuing thread has waited: its copy is now an ordinary write of its warp."""
        warp, cell = self._cells(lanes, at, n)
        self.in_flight[cell] = False
        self.write_clock[cell] = self.clocks.own(warp)

    # -- bulk copies
    def bulk_issue(self, ins: Ins, lanes: np.ndarray, chunks: np.ndarray) -> None:
        """A copy to 16-byte chunks at arena offsets [lanes, n] begins."""
        warp, cell = self._chunk_cells(lanes, chunks)
        self._check_flight(ins, warp, cell, "copy")
        self._check_writes(ins, warp, cell, "copy", None)
        self._check_reads(ins, warp, cell, None, "copy")
        self._check_fenced(ins, warp, cell, "copy", "the copy")
        if self.remote_pc is not None:
            self._check_same_target(ins, warp, cell)
        self._record_write(ins, warp, cell)
        self.reads[cell] = 0  # what comes after this write comes after them
        self.in_flight[cell] = self.flying = True
        self.atomic_write[cell] = False

    def _check_same_target(self, ins: Ins, warp: np.ndarray, cell: np.ndarray) -> None:
        """Copies that CTAs of a cluster issue at once to one place."""
        order = np.arange(len(cell), dtype=np.int32)
        self.scratch[cell] = order
        clash = self.scratch[cell] != order
        if clash.any():
            self._report(ins, warp, cell, clash, "copy", "copy by another thread", None, _BULK_HINT)

    def bulk_land(
        self, lanes: np.ndarray, chunks: np.ndarray, thing: np.ndarray, phase: np.ndarray
    ) -> None:
        """The bytes belong to phase number ``phase`` (from 1) of an object per lane."""
        cells = self._chunk_cells(lanes, chunks)[1]
        parts = len(cells) // chunks.size
        agent = np.broadcast_to(self.clocks.agent_of(thing)[:, None], chunks.shape).reshape(-1)
        time = np.broadcast_to(phase[:, None], chunks.shape).reshape(-1)
        self.in_flight[cells] = False
        self.write_agent[cells] = np.tile(agent, parts)
        self.write_clock[cells] = np.tile(time, parts)

    def store_issue(self, ins: Ins, lanes: np.ndarray, chunks: np.ndarray) -> None:
        """A bulk store begins to read chunks [lanes, n]."""
        warp, cell = self._chunk_cells(lanes, chunks)
        self._check_flight(ins, warp, cell, "read")
        self._check_writes(ins, warp, cell, "read", None)
        self._check_fenced(ins, warp, cell, "read", "the store")
        self.read_pc[cell] = ins.pc
        self.storing = True
        np.add.at(self.store_reads, chunks.reshape(-1) >> _CHUNK, 1)

    def store_done(self, ins: Ins, lanes: np.ndarray, chunks: np.ndarray) -> None:
        """The issuing threads have waited: these are reads of theirs like others."""
        self._record_read(ins, *self._chunk_cells(lanes, chunks))
        self.source_read(chunks)

    def source_read(self, chunks: np.ndarray) -> None:
        """A bulk copy has read chunks [lanes, n]."""
        np.subtract.at(self.store_reads, chunks.reshape(-1) >> _CHUNK, 1)

    # -- wgmma
    def tensor_issue(
        self, ins: Ins, warps: np.ndarray, chunks: np.ndarray, group: np.ndarray
    ) -> None:
        """Products of ``warps``, in wgmma-groups number ``group``, read chunks [warps, n]."""
        warp, cell = self._chunk_cells(warps * 32, chunks)
        self._check_flight(ins, warp, cell, "read")
        self._check_writes(ins, warp, cell, "read", None)
        self._check_fenced(ins, warp, cell, "read", "wgmma")
        self.read_pc[cell] = ins.pc
        place = cell * self.reads.shape[1] + self.clocks.tensor_agent(warp)
        reads = self.reads.reshape(-1)
        numbers = np.zeros(len(self.clocks.table), np.int64)
        numbers[warps] = group + 1
        for number in np.unique(numbers[warps]):
            pick = place if (numbers[warps] == number).all() else place[numbers[warp] == number]
            reads[pick] = np.maximum(reads[pick], number)

    def tensor_done(self, warps: np.ndarray, groups: np.ndarray) -> None:
        """The warps have waited until the first ``groups`` groups of their warpgroup were done."""
        self.clocks.learn(warps, self.clocks.tensor_agent(warps), groups)
