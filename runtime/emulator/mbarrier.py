"""mbarriers: objects in shared memory at which threads and bulk copies meet, phase by phase.

An object counts the arrivals and the bytes (tx-count) that its phase still lacks. A thread that
tries to wait is parked until the phase completes, so a wait loop costs one turn of the scheduler
however long it would spin, and one that nobody can end is a deadlock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minitriton.runtime.emulator.access import memory_operand, shared_addresser
from minitriton.runtime.emulator.checks import MbarrierMisuse
from minitriton.runtime.emulator.memory import error
from minitriton.runtime.emulator.module import Ins, Mem, Reg
from minitriton.runtime.emulator.operands import lanes_of, reader, writer

Step = Callable[[Any, Any], None]
#: Largest arrival count and tx-count of the PTX ISA.
LIMIT = (1 << 20) - 1


class Mbarriers:
    """All mbarriers of a chunk; arrays have an element per 8 bytes of its shared memory."""

    def __init__(self, chunk: Any) -> None:
        self.c = chunk
        size = len(chunk.shared.bytes) >> 3
        self.per_cta = chunk.shared.stride >> 3
        self.per_cluster = self.per_cta * chunk.cluster.size
        self.live = np.zeros(size, bool)
        self.count, self.pending, self.tx, self.phase = np.zeros((4, size), np.int64)
        #: Phases completed over all objects that lived here, and their number in the clocks.
        self.epoch = np.zeros(size, np.int64)
        self.thing = np.full(size, -1, np.int64)
        self.waiting = np.full(chunk.L, -1, np.int64)  # slot per parked lane
        self.results: dict[int, tuple[Any, bool]] = {}  # by pc: predicate's writer, acquires
        chunk.shared.guard = self.refuse_plain

    # -- objects
    def find(self, ins: Ins, c: Any, ix: Any, address: np.ndarray, by_copy: bool) -> np.ndarray:
        """The slots of the live objects at ``address``, one per lane."""
        lanes = lanes_of(c, ix)
        at = np.broadcast_to(c.shared.index(ins, c, ix, address, 8, guarded=False), lanes.shape)
        slot = at >> 3
        dead = ~self.live[slot]
        if dead.any():
            hint = "mbarrier.init must come first, and a barrier before other threads use it"
            raise self._misuse(ins, lanes, slot, dead, "no mbarrier has been initialised", hint)
        if c.race is not None:
            c.race.object_used(ins, lanes, at, by_copy)
        return slot

    def init(self, ins: Ins, lanes: np.ndarray, at: np.ndarray, count: np.ndarray) -> None:
        c, slot = self.c, at >> 3
        if self.live[slot].any():
            hint = "mbarrier.inval must come between"
            raise self._misuse(ins, lanes, slot, self.live[slot], "initialised twice", hint)
        bad = (count < 1) | (count > LIMIT)
        if bad.any():
            message = f"count {int(count[bad][0])} is not in 1 .. {LIMIT}"
            raise self._misuse(ins, lanes, slot, bad, message)
        if c.race is not None:
            c.race.object_made(ins, lanes, at)
            self._number(slot)
        self.live[slot] = True
        self.count[slot] = self.pending[slot] = count
        self.tx[slot] = self.phase[slot] = 0
        offsets = slot % self.per_cta << 3
        low, high = c.shared.guarded
        c.shared.guarded = (min(low, int(offsets.min())), max(high, int(offsets.max()) + 8))
        c.progress += 1

    def _number(self, slot: np.ndarray) -> None:
        """Give new objects a number in the clocks, the same in every cluster for the same place."""
        for place in np.unique(slot[self.thing[slot] < 0] % self.per_cluster):
            self.thing[place :: self.per_cluster] = self.c.race.clocks.add_object()

    def inval(self, ins: Ins, lanes: np.ndarray, slot: np.ndarray) -> None:
        c = self.c
        busy = np.isin(slot, self.waiting)
        if busy.any():
            raise self._misuse(ins, lanes, slot, busy, "invalidated while threads wait for it")
        flying = np.isin(slot, c.engines["bulk"].targets())
        if flying.any():
            raise self._misuse(ins, lanes, slot, flying, "invalidated while a copy is in flight")
        if c.race is not None:
            c.race.object_made(ins, lanes, slot << 3)
        self.live[slot] = False
        if c.uninit is not None:
            c.shared.defined.views[8][slot] = 0
        c.progress += 1

    def refuse_plain(self, ins: Ins, ix: Any, at: np.ndarray, n: int) -> None:
        """Any other access to the 8 bytes of a live object (see `Arena.index`)."""
        slot = at >> 3
        bad = self.live[slot] if n <= 8 else self.live[slot] | self.live[slot + 1]
        if bad.any():
            lanes = np.broadcast_to(lanes_of(self.c, ix), bad.shape)
            slot = np.where(self.live[slot], slot, slot + 1)
            hint = "mbarrier.inval must come before its bytes are used for anything else"
            raise self._misuse(ins, lanes, slot, bad, "accessed as plain memory", hint)

    def _misuse(
        self, ins: Ins, lanes: np.ndarray, slot: np.ndarray, bad: np.ndarray, what: str,
        hint: str = "",
    ) -> Exception:  # fmt: skip
        message = f"{self._name(int(slot[bad][0]))}: {what}"
        return error(MbarrierMisuse, ins, self.c, lanes[bad], message, hint)

    def _name(self, slot: int) -> str:
        name = f"mbarrier at shared offset {slot % self.per_cta << 3:#x}"
        if self.c.cluster.size == 1:
            return name
        return f"{name} of CTA {self.c.cta_name(slot // self.per_cta)}"

    def _state(self, slot: int) -> str:
        return (
            f"phase {self.phase[slot]}, {self.pending[slot]} of {self.count[slot]} arrivals and "
            f"{self.tx[slot]} bytes outstanding"
        )

    # -- phases
    def expect(self, ins: Ins, lanes: np.ndarray, slot: np.ndarray, number: np.ndarray) -> None:
        """Add to the bytes that the phase waits for (a copy that lands adds a negative number)."""
        np.add.at(self.tx, slot, number)
        over = np.abs(self.tx[slot]) > LIMIT
        if over.any():
            message = f"tx-count {int(self.tx[slot][over][0])} is beyond {LIMIT}"
            raise self._misuse(ins, lanes, slot, over, message)

    def arrive(self, ins: Ins, lanes: np.ndarray, slot: np.ndarray, number: np.ndarray) -> None:
        np.subtract.at(self.pending, slot, number)
        over = self.pending[slot] < 0
        if over.any():
            pending = int(self.pending[slot][over][0])
            count = int(self.count[slot][over][0])
            message = f"{-pending} arrivals too many in phase {self.phase[slot[over][0]]}"
            hint = f"it was initialised for {count} arrivals"
            raise self._misuse(ins, lanes, slot, over, message, hint)
        self.settle(ins, lanes, slot)

    def settle(self, ins: Ins, lanes: np.ndarray, slot: np.ndarray) -> None:
        """Complete the phases that lack nothing any more."""
        self.c.progress += 1
        full = self.pending[slot] == 0
        under = full & (self.tx[slot] < 0)
        if under.any():
            more = -int(self.tx[slot][under][0])
            message = (
                f"{more} bytes more than expected arrived in phase {self.phase[slot[under][0]]}"
            )
            hint = "the expect_tx of a phase must sum up all bytes of its copies, whole boxes"
            raise self._misuse(ins, lanes, slot, under, message, hint)
        done = np.unique(slot[full & (self.tx[slot] == 0)])
        if not len(done):
            return
        self.phase[done] += 1
        self.epoch[done] += 1
        self.pending[done] = self.count[done]
        if self.c.race is not None:
            self.c.race.clocks.publish(done // self.per_cluster, self.thing[done], self.epoch[done])
        self._wake(done)

    def _wake(self, done: np.ndarray) -> None:
        c = self.c
        lanes = np.flatnonzero(np.isin(self.waiting, done))
        for pc in np.unique(c.lane_pc[lanes]):
            group = lanes[c.lane_pc[lanes] == pc]
            write, acquires = self.results[int(pc)]
            write(c, group, True)
            if acquires:
                self.acquire(group, self.waiting[group])
        self.waiting[lanes] = -1
        c.unpark(lanes)

    def release(self, lanes: np.ndarray, slot: np.ndarray, to_cluster: bool) -> None:
        if self.c.race is not None:
            if to_cluster:
                self.c.race.release_to_cluster(lanes)
            self.c.race.clocks.release(lanes, self.thing[slot])

    def acquire(self, lanes: np.ndarray, slot: np.ndarray) -> None:
        if self.c.race is not None and len(lanes):
            self.c.race.clocks.acquire(lanes, self.thing[slot])

    def needed(self) -> np.ndarray:
        """The slots that threads wait for."""
        return np.unique(self.waiting[self.waiting >= 0])

    def describe(self, lane: int) -> str:
        """What a parked lane is waiting for."""
        slot = int(self.waiting[lane])
        return f"the {self._name(slot)}: {self._state(slot)}, parity {self.phase[slot] & 1}"


def _finder(ins: Ins, position: int) -> Callable[[Any, Any], np.ndarray]:
    address = shared_addresser(ins, memory_operand(ins, position))
    return lambda c, ix: c.mbarriers.find(ins, c, ix, address(c, ix), False)


def _init(ins: Ins) -> Step:
    address, read = shared_addresser(ins, memory_operand(ins, 0)), reader(ins, ins.ops[1], 32)

    def run(c: Any, ix: Any) -> None:
        lanes = lanes_of(c, ix)
        at = c.shared.index(ins, c, ix, address(c, ix), 8, guarded=False)
        count = np.broadcast_to(read(c, ix), lanes.shape).astype(np.int64)
        c.mbarriers.init(ins, lanes, np.broadcast_to(at, lanes.shape), count)

    return run


def _inval(ins: Ins) -> Step:
    find = _finder(ins, 0)
    return lambda c, ix: c.mbarriers.inval(ins, lanes_of(c, ix), find(c, ix))


def _transactions(ins: Ins) -> Step:
    """expect_tx and complete_tx, which arrive for nobody."""
    find, read = _finder(ins, 0), reader(ins, ins.ops[1], 32)
    sign = 1 if ins.mods[0] == "expect_tx" else -1

    def run(c: Any, ix: Any) -> None:
        lanes, slot = lanes_of(c, ix), find(c, ix)
        number = np.broadcast_to(read(c, ix), lanes.shape).astype(np.int64)
        c.mbarriers.expect(ins, lanes, slot, sign * number)
        if sign < 0:
            c.mbarriers.settle(ins, lanes, slot)

    return run


def _arrive(ins: Ins) -> Step:
    if "noComplete" in ins.mods or isinstance(ins.ops[0], Mem):
        raise ins.unsupported()
    expects = "expect_tx" in ins.mods
    find, write = _finder(ins, 1), writer(ins, ins.ops[0], 64)
    read = reader(ins, ins.ops[2], 32) if len(ins.ops) > 2 else None
    dest, releases = ins.ops[0], "relaxed" not in ins.mods
    if "shared::cluster" in ins.mods and isinstance(dest, Reg):
        raise ins.unsupported("an arrival in the cluster returns no state")

    def run(c: Any, ix: Any) -> None:
        state, lanes, slot = c.mbarriers, lanes_of(c, ix), find(c, ix)
        number = np.ones(len(lanes), np.int64)
        given = number if read is None else np.broadcast_to(read(c, ix), lanes.shape)
        if expects:
            state.expect(ins, lanes, slot, given.astype(np.int64))
        else:
            number = given.astype(np.int64)
        write(c, ix, state.phase[slot].view(np.uint64))
        if c.uninit is not None and isinstance(dest, Reg):
            c.uninit.written(dest.index, ix)
        if releases:
            state.release(lanes, slot, "cluster" in ins.mods)
        state.arrive(ins, lanes, slot, number)

    return run


def _tester(ins: Ins) -> Callable[[Any, Any], tuple[np.ndarray, np.ndarray]]:
    """callable(chunk, ix) -> (slot, whether the phase asked for is complete) per lane."""
    find, by_parity = _finder(ins, 1), "parity" in ins.mods
    read = reader(ins, ins.ops[2], 32 if by_parity else 64)

    def test(c: Any, ix: Any) -> tuple[np.ndarray, np.ndarray]:
        slot, lanes = find(c, ix), lanes_of(c, ix)
        asked = np.broadcast_to(read(c, ix), slot.shape).astype(np.int64)
        if by_parity and (asked >> 1).any():
            bad = asked >> 1 != 0
            message = f"parity {int(asked[bad][0])} is neither 0 nor 1"
            raise error(MbarrierMisuse, ins, c, lanes[bad], message, "wait for phase & 1")
        phase = c.mbarriers.phase[slot]
        return slot, (phase & 1 if by_parity else phase) != asked

    return test


def try_wait(ins: Ins) -> Callable[[Any, Any], bool]:
    """mbarrier.try_wait; see `decode.Blocking`."""
    if "shared::cluster" in ins.mods:
        raise ins.unsupported("only the CTA of an mbarrier waits for it")
    test, write = _tester(ins), writer(ins, ins.ops[0], 1)
    dest, acquires = ins.ops[0], "relaxed" not in ins.mods

    def arrive(c: Any, ix: Any) -> bool:
        state, lanes = c.mbarriers, lanes_of(c, ix)
        slot, ready = test(c, ix)
        state.results[ins.pc] = write, acquires
        if c.uninit is not None and isinstance(dest, Reg):
            c.uninit.written(dest.index, ix)
        write(c, ix, ready)
        if acquires:
            state.acquire(lanes[ready], slot[ready])
        if ready.all():
            return True
        c.split()
        c.key[lanes[ready]] = ins.pc + 1
        state.waiting[lanes[~ready]] = slot[~ready]
        c.park(lanes[~ready], ins.pc, state)
        return False

    return arrive


def _test_wait(ins: Ins) -> Step:
    """mbarrier.test_wait answers at once; that somebody asks is what late copies wait for."""
    test, write = _tester(ins), writer(ins, ins.ops[0], 1)
    dest, acquires = ins.ops[0], "relaxed" not in ins.mods

    def run(c: Any, ix: Any) -> None:
        slot, ready = test(c, ix)
        if not ready.all() and c.engines["bulk"].land(np.unique(slot[~ready])):
            slot, ready = test(c, ix)
        if acquires:
            c.mbarriers.acquire(lanes_of(c, ix)[ready], slot[ready])
        write(c, ix, ready)
        if c.uninit is not None and isinstance(dest, Reg):
            c.uninit.written(dest.index, ix)

    return run


_REMOTE = frozenset({"arrive", "expect_tx", "complete_tx"})
_FORMS: dict[str, Callable[[Ins], Step]] = {
    "init": _init,
    "inval": _inval,
    "expect_tx": _transactions,
    "complete_tx": _transactions,
    "arrive": _arrive,
    "test_wait": _test_wait,
}


def mbarrier(ins: Ins) -> Step:
    """mbarrier.init, inval, expect_tx, complete_tx, arrive and test_wait, without waiting."""
    if ins.type != "b64" or ins.mods[0] not in _FORMS:
        raise ins.unsupported()
    if "shared::cluster" in ins.mods and ins.mods[0] not in _REMOTE:
        raise ins.unsupported("only arrivals and transactions reach other CTAs")
    return _FORMS[ins.mods[0]](ins)


RULES: dict[str, Callable[[Ins], Step]] = {"mbarrier": mbarrier}
