"""cp.async (without .bulk): copies from global to shared memory that land later, in groups.

The landing policy is an oracle: *late* copies only when a thread waits, *early* at issue,
*random* by a seeded coin. Source bytes are read when the copy lands, so a source that is
overwritten too early, or a missing wait, shows in the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from minitriton.runtime.emulator.access import addresser, memory_operand
from minitriton.runtime.emulator.memory import CARRIER, SHIFT
from minitriton.runtime.emulator.module import Ins, Mem
from minitriton.runtime.emulator.operands import lanes_of, reader
from minitriton.runtime.emulator.syntax import Immediate

Step = Callable[[Any, Any], None]


@dataclass(slots=True)
class Copy:
    """Copies of ``size`` bytes issued together, one per lane."""

    ins: Ins
    size: int
    lanes: np.ndarray
    group: np.ndarray
    source: np.ndarray
    target: np.ndarray
    valid: np.ndarray | None  # bytes to copy per lane, the rest is zero; None: all


class CopyEngine:
    """The cp.async operations of a chunk that have not landed, and the threads' group counts."""

    def __init__(self, chunk: Any) -> None:
        self.c = chunk
        self.pending: list[Copy] = []
        self.committed = np.zeros(chunk.L, np.int64)

    def issue(self, copy: Copy) -> None:
        c = self.c
        policy = c.landing
        if policy == "random":
            policy = "early" if c.rng.random() < 0.5 else "late"
        if c.race is not None:
            c.race.issue_async(copy.ins, c, copy.lanes, copy.target, copy.size)
        if policy == "early":
            self._move(copy)
        # An early copy stays listed so that the race check still sees it as in flight.
        if policy == "late" or c.race is not None:
            self.pending.append(copy if policy == "late" else _moved(copy))

    def commit(self, lanes: np.ndarray) -> None:
        self.committed[lanes] += 1

    def wait(self, lanes: np.ndarray, keep: int | None) -> None:
        """Land, for each lane, all but its ``keep`` newest groups (None: everything issued)."""
        if not self.pending:
            return
        limit = np.full(self.c.L, -1, np.int64)
        limit[lanes] = np.iinfo(np.int64).max if keep is None else self.committed[lanes] - keep
        kept = []
        for copy in self.pending:
            due = copy.group < limit[copy.lanes]
            if due.all():
                self._land(copy)
            elif due.any():
                self._land(_subset(copy, due))
                kept.append(_subset(copy, ~due))
            else:
                kept.append(copy)
        self.pending = kept

    def _land(self, copy: Copy) -> None:
        if copy.source.size:
            self._move(copy)
        if self.c.race is not None:
            self.c.race.land_async(copy.lanes, copy.target, copy.size)

    def _move(self, copy: Copy) -> None:
        c, n = self.c, copy.size
        data = np.zeros(len(copy.lanes), CARRIER[n])
        valid = copy.valid
        if valid is None:
            data = c.globals.load(copy.ins, c, copy.lanes, copy.source, n)
        else:
            whole = np.flatnonzero(valid == n)
            if len(whole):
                data[whole] = c.globals.load(copy.ins, c, copy.lanes[whole], copy.source[whole], n)
            raw = data.view(np.uint8).reshape(-1, n)
            for k in np.flatnonzero((valid > 0) & (valid < n)):
                count = int(valid[k])
                where = copy.source[k] + np.arange(count, dtype=np.uint64)
                owner = np.repeat(copy.lanes[k], count)
                raw[k, :count] = c.globals.load(copy.ins, c, owner, where, 1)
        c.shared.views[n][copy.target >> SHIFT[n]] = data
        if c.uninit is not None:
            c.uninit.stored_bytes(c.shared, copy.target, n)
        c.progress += 1


def _moved(copy: Copy) -> Copy:
    empty = copy.source[:0]
    return Copy(copy.ins, copy.size, copy.lanes, copy.group, empty, copy.target, None)


def _subset(copy: Copy, pick: np.ndarray) -> Copy:
    source = copy.source[pick] if copy.source.size else copy.source
    valid = None if copy.valid is None else copy.valid[pick]
    return Copy(
        copy.ins, copy.size, copy.lanes[pick], copy.group[pick], source, copy.target[pick], valid
    )


def _copy(ins: Ins) -> Step:
    target, source = memory_operand(ins, 0), memory_operand(ins, 1)
    if not isinstance(ins.ops[2], Immediate):
        raise ins.unsupported("the copy size must be a literal")
    n = ins.ops[2].value
    to, origin = addresser(ins, target, "shared"), addresser(ins, source, "global")
    extra = next((o for o in ins.ops[3:] if not isinstance(o, Mem)), None)
    if "L2::cache_hint" in ins.mods and len(ins.ops) == 4:
        extra = None
    # The fourth operand is a byte count, or a predicate that makes the source ignored.
    bits = getattr(extra, "bits", 32)
    is_flag = bits == 1 or (extra is not None and type(extra).__name__ == "Not")
    read_extra = None if extra is None else reader(ins, extra, 1 if is_flag else 32)

    def run(c: Any, ix: Any) -> None:
        lanes = lanes_of(c, ix)
        at = c.shared.index(ins, c, ix, np.broadcast_to(to(c, ix), lanes.shape), n)
        address = np.broadcast_to(origin(c, ix), lanes.shape).copy()
        valid = None
        if read_extra is not None:
            given = np.broadcast_to(read_extra(c, ix), lanes.shape)
            valid = np.where(given, 0, n) if is_flag else np.minimum(given, n).astype(np.int64)
            if (valid == n).all():
                valid = None
        _check_source(ins, c, lanes, address, n, valid)
        engine: CopyEngine = c.engines["cp.async"]
        group = engine.committed[lanes]
        engine.issue(Copy(ins, n, lanes, group, address, at, valid))
        c.bytes["copy_async"] += len(lanes) * n

    return run


def _check_source(
    ins: Ins, c: Any, lanes: np.ndarray, address: np.ndarray, n: int, valid: np.ndarray | None
) -> None:
    """Bounds are checked at issue, where the faulty address was made."""
    if valid is None:
        c.globals.pieces(ins, c, lanes, address, n, False)
        return
    for count in np.unique(valid):
        if count:
            pick = np.flatnonzero(valid == count)
            if count == n:
                c.globals.pieces(ins, c, lanes[pick], address[pick], n, False)
            else:
                last = address[pick] + np.uint64(count - 1)
                c.globals.pieces(ins, c, lanes[pick], address[pick], 1, False)
                c.globals.pieces(ins, c, lanes[pick], last, 1, False)


def cp(ins: Ins) -> Step:
    """cp.async, its commit_group, wait_group and wait_all."""
    if ins.mods[:1] != ("async",) or "mbarrier" in ins.mods:
        raise ins.unsupported()
    if "commit_group" in ins.mods:
        return lambda c, ix: c.engines["cp.async"].commit(lanes_of(c, ix))
    if "wait_group" in ins.mods:
        keep = ins.ops[0].value
        return lambda c, ix: c.engines["cp.async"].wait(lanes_of(c, ix), keep)
    if "wait_all" in ins.mods:
        return lambda c, ix: c.engines["cp.async"].wait(lanes_of(c, ix), None)
    return _copy(ins)


RULES: dict[str, Callable[[Ins], Step]] = {"cp": cp}
