"""Shared-memory races: two warps touch a word, one writes, and no barrier orders them.

Happens-before by vector clocks of a CTA's warps, joined at barriers. Each granule of shared
memory remembers its last write (warp, clock) and per warp the clock of its last read. Copies in
flight (cp.async) conflict with every access until they land. Writes of the value that is there
already are benign.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minitriton.runtime.emulator.checks import SharedRace
from minitriton.runtime.emulator.memory import CARRIER, SHIFT, error
from minitriton.runtime.emulator.module import Ins

_HINT = "a bar.sync must order the two accesses"
_TENSOR_HINT = "wait with wgmma.wait_group and then a barrier before the bytes are written"
_FENCE_HINT = "fence.proxy.async must stand between the write and the barrier before wgmma"
_TENSOR_CHUNK = 4  # log2 of the bytes that wgmma reads together
_FLIGHT_HINT = "wait with cp.async.wait_group and then a barrier before touching the bytes"


class RaceDetector:
    """Clocks and shadow memory of one chunk."""

    def __init__(self, chunk: Any) -> None:
        self.c = chunk
        self.warps = chunk.padded // 32
        ctas, granule = chunk.ctas, chunk.launch.granule
        self.shift = SHIFT[granule]
        self.per_cta = chunk.shared.stride >> self.shift
        size = ctas * self.per_cta
        #: clock[warp of chunk, warp of CTA]: what each warp knows of the others.
        self.clock = np.zeros((ctas * self.warps, self.warps), np.int32)
        self.local = np.arange(ctas * self.warps) % self.warps
        self._tick(np.arange(ctas * self.warps))
        self.write_warp = np.zeros(size, np.int32)
        self.write_clock = np.zeros(size, np.int32)
        self.write_pc = np.zeros(size, np.int32)
        self.reads = np.zeros((size, self.warps), np.int32)
        self.read_pc = np.zeros(size, np.int32)
        self.in_flight = np.zeros(size, bool)
        self.flying = False
        self.atomic_write = np.zeros(size, bool)
        self.scratch = np.zeros(size, np.int32)
        # wgmma: readers in flight of 16-byte chunks, and granules it cannot see for want of a fence
        self.has_wgmma = any(ins.op == "wgmma" for ins in chunk.launch.program.code)
        self.tensor_reads = np.zeros((size >> _TENSOR_CHUNK - self.shift) + 1, np.int32)
        self.unfenced = np.zeros(size, bool)

    def own_clock(self, warp: np.ndarray) -> np.ndarray:
        return self.clock.reshape(-1).take(warp * self.warps + self.local[warp])

    def _tick(self, warps: np.ndarray) -> None:
        self.clock[warps, warps % self.warps] += 1

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

    def read(self, ins: Ins, c: Any, ix: Any, at: np.ndarray, n: int) -> None:
        """Check and record plain reads of n bytes at arena offsets ``at``."""
        warp, cell = self._cells(ix, at, n)
        self._check_flight(ins, warp, cell, "read")
        self._check_writes(ins, warp, cell, "read", None)
        self._record_read(ins, warp, cell)

    def _record_read(self, ins: Ins, warp: np.ndarray, cell: np.ndarray) -> None:
        self.reads.reshape(-1)[cell * self.warps + self.local[warp]] = self.own_clock(warp)
        self.read_pc[cell] = ins.pc

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
        self.write_warp[cell] = self.local[warp]
        self.write_clock[cell] = self.own_clock(warp)
        self.write_pc[cell] = ins.pc
        if self.has_wgmma:
            self.unfenced[cell] = True

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
        flying = self.in_flight[cell]
        if flying.any():
            self._report(
                ins, warp, cell, flying, verb, "copy in flight", self.write_pc, _FLIGHT_HINT
            )

    def _check_writes(
        self, ins: Ins, warp: np.ndarray, cell: np.ndarray, verb: str, changed: Any
    ) -> None:
        # A cell nobody wrote has clock 0, which everybody knows; a warp knows its own clock.
        writer = self.write_warp.take(cell)
        known = self.clock.reshape(-1).take(warp * self.warps + writer)
        bad = self.write_clock.take(cell) > known
        if changed is not None:
            bad &= changed
        if bad.any():
            self._report(ins, warp, cell, bad, verb, "write", self.write_pc)

    def _check_reads(self, ins: Ins, warp: np.ndarray, cell: np.ndarray, changed: Any) -> None:
        late = self.reads[cell] > self.clock[warp]
        bad = late.any(1)
        if changed is not None:
            bad &= changed
        if bad.any():
            self._report(ins, warp, cell, bad, "write", "read", self.read_pc)
        if self.has_wgmma:
            flying = self.tensor_reads[cell >> _TENSOR_CHUNK - self.shift] > 0
            if changed is not None:
                flying &= changed
            if flying.any():
                what = "wgmma in flight"
                self._report(ins, warp, cell, flying, "write", what, self.read_pc, _TENSOR_HINT)

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
        offset = int(cell[k] % self.per_cta) << self.shift
        where = f"PTX line {rival.line}"
        if rival.loc:
            where = f"{rival.loc[0]}:{rival.loc[1]}:{rival.loc[2]} ({where})"
        message = (
            f"{verb} of shared memory at offset {offset:#x} is not ordered after the {other} at "
            f"{where}; {int(bad.sum())} words affected"
        )
        lanes = np.unique(warp[bad]) * 32
        raise error(
            SharedRace, ins, self.c, lanes, message, hint,
            offset=offset, other_line=rival.line, other_location=rival.loc,
        )  # fmt: skip

    # -- ordering
    def barrier(self, lanes: np.ndarray) -> None:
        """All ``lanes`` (of any number of CTAs) passed one barrier per CTA together."""
        warps = np.unique(lanes >> 5)
        cta = warps // self.warps
        known = np.zeros((self.c.ctas, self.warps), np.int32)
        np.maximum.at(known, cta, self.clock[warps])
        self.clock[warps] = known[cta]
        self._tick(warps)

    def warp_sync(self, lanes: np.ndarray) -> None:
        """bar.warp.sync orders lanes of one warp, which are one agent here."""

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
        self.write_clock[cell] = self.own_clock(warp)

    # -- wgmma
    def tensor_issue(self, ins: Ins, warps: np.ndarray, chunks: np.ndarray) -> None:
        """A product of ``warps`` begins to read 16-byte chunks at arena offsets [warps, n]."""
        warp, cell = self._chunk_cells(warps, chunks)
        self._check_flight(ins, warp, cell, "read")
        self._check_writes(ins, warp, cell, "read", None)
        unfenced = self.unfenced[cell]
        if unfenced.any():
            what = "write that no fence.proxy.async followed"
            self._report(ins, warp, cell, unfenced, "read", what, self.write_pc, _FENCE_HINT)
        self.read_pc[cell] = ins.pc
        np.add.at(self.tensor_reads, chunks.reshape(-1) >> _TENSOR_CHUNK, 1)

    def tensor_done(self, ins: Ins, warps: np.ndarray, chunks: np.ndarray) -> None:
        """The warps have waited: these are reads of theirs like others."""
        self._record_read(ins, *self._chunk_cells(warps, chunks))
        np.subtract.at(self.tensor_reads, chunks.reshape(-1) >> _TENSOR_CHUNK, 1)

    def _chunk_cells(self, warps: np.ndarray, chunks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        lanes = np.broadcast_to((warps * 32)[:, None], chunks.shape)
        return self._cells(lanes.reshape(-1), chunks.reshape(-1), 1 << _TENSOR_CHUNK)

    def proxy_fence(self, lanes: np.ndarray) -> None:
        """What these warps wrote, copies that have landed included, is visible to wgmma."""
        fenced = np.zeros(self.c.ctas * self.warps, bool)
        fenced[np.unique(lanes >> 5)] = True
        writer = self.write_warp.reshape(self.c.ctas, -1)
        done = np.take_along_axis(fenced.reshape(self.c.ctas, -1), writer, 1).reshape(-1)
        self.unfenced &= ~(done & ~self.in_flight)
