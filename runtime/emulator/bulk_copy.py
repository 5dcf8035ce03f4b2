"""cp.async.bulk: copies of boxes and of straight bytes that one thread starts (TMA).

A load arrives at an mbarrier with its bytes, a store belongs to the thread's bulk-group. The
landing policy is an oracle, as for cp.async: *late* loads land when all that could run waits and
somebody waits for their mbarrier, late stores read their source at wait_group and write memory
when it is not merely .read. A source is read when its copy lands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from minitriton.runtime.emulator.access import addresser, memory_operand, shared_addresser
from minitriton.runtime.emulator.boxes import Items, MapReader, box_items, fill_value, map_reader
from minitriton.runtime.emulator.checks import (
    MbarrierMisuse,
    Misaligned,
    OutOfBounds,
    SharedRace,
)
from minitriton.runtime.emulator.cluster_memory import mapped
from minitriton.runtime.emulator.memory import CARRIER, SHIFT, error
from minitriton.runtime.emulator.module import Ins
from minitriton.runtime.emulator.operands import Reader, lanes_of, reader
from minitriton.runtime.emulator.syntax import Vector

Step = Callable[[Any, Any], None]
_CHUNK = 16  # bytes that copies move at least, and their alignment
_BOX_ALIGN = 128
_KNOWN = frozenset({
    "async", "bulk", "tensor", "1d", "2d", "3d", "4d", "5d", "tile", "global", "shared::cluster",
    "shared::cta", "multicast::cluster", "bulk_group", "prefetch", "L2", "L2::cache_hint",
    "mbarrier::complete_tx::bytes",
})  # fmt: skip


@dataclass(slots=True)
class Copy:
    """Copies issued together, one per lane; arrays have a row per lane.

    ``items.shared`` and ``chunks`` (all 16-byte pieces of the boxes) are offsets in the arena.
    """

    ins: Ins
    lanes: np.ndarray
    items: Items
    chunks: np.ndarray
    #: Loads: the mbarrier per lane, and an item of what lies outside the tensor.
    slot: np.ndarray
    fill: np.ndarray
    #: Stores: the bulk-group per lane, the bytes once read, and whether memory has them.
    group: np.ndarray
    tf32: bool = False  # loads: whether floats are rounded to that
    source: np.ndarray | None = None  # loads from shared memory: its chunks in the arena
    data: np.ndarray | None = None
    written: bool = False
    awaited: bool = False

    def subset(self, pick: np.ndarray) -> Copy:
        items = self.items
        inside = None if items.inside is None else items.inside[pick]
        return replace(
            self,
            lanes=self.lanes[pick],
            items=Items(items.size, items.shared[pick], items.address[pick], inside),
            chunks=self.chunks[pick],
            slot=self.slot[pick],
            group=self.group[pick],
            data=None if self.data is None else self.data[pick],
            source=None if self.source is None else self.source[pick],
        )

    def uses(self, ended: np.ndarray, per_cta: int) -> np.ndarray:
        """Whether each lane's copy needs the shared memory (``per_cta`` bytes) of ended CTAs."""
        needs = ended[self.chunks[:, 0] // per_cta]
        return needs if self.source is None else needs | ended[self.source[:, 0] // per_cta]

    def present(self) -> tuple[np.ndarray, np.ndarray]:
        """(lane, address) of each item inside the tensor."""
        items = self.items
        owners = np.broadcast_to(self.lanes[:, None], items.shared.shape)
        if items.inside is None:
            return owners.reshape(-1), items.address.reshape(-1)
        return owners[items.inside], items.address[items.inside]


def _split(copies: list[Copy], due: Callable[[Copy], np.ndarray]) -> tuple[list[Copy], list[Copy]]:
    """The parts of ``copies`` of the lanes that are due, and the rest."""
    taken, kept = [], []
    for copy in copies:
        mask = due(copy)
        if mask.all():
            taken.append(copy)
        elif mask.any():
            taken.append(copy.subset(mask))
            kept.append(copy.subset(~mask))
        else:
            kept.append(copy)
    return taken, kept


class BulkEngine:
    """The bulk copies of a chunk that have not landed, and the threads' group counts."""

    def __init__(self, chunk: Any) -> None:
        self.c = chunk
        self.loads: list[Copy] = []
        self.stores: list[Copy] = []
        self.committed = np.zeros(chunk.L, np.int64)

    def _is_early(self) -> bool:
        policy = self.c.landing
        return policy == "early" or (policy == "random" and self.c.rng.random() < 0.5)

    # -- loads
    def issue_load(self, copy: Copy) -> None:
        c = self.c
        if c.race is not None:
            if copy.source is not None:
                c.race.store_issue(copy.ins, copy.lanes, copy.source)
            c.race.bulk_issue(copy.ins, copy.lanes, copy.chunks)
        if c.uninit is not None and copy.source is not None:
            owners = np.repeat(copy.lanes, copy.source.shape[1])
            c.uninit.require_shared(copy.ins, owners, copy.source.reshape(-1), _CHUNK)
        if self._is_early():
            self._land(copy)
        else:
            self.loads.append(copy)

    def land(self, slots: np.ndarray) -> bool:
        """Land the loads that arrive at these mbarriers; whether there were any."""
        if not self.loads:
            return False
        taken, self.loads = _split(self.loads, lambda copy: np.isin(copy.slot, slots))
        for copy in taken:
            self._land(copy)
        return bool(taken)

    def targets(self) -> np.ndarray:
        """The mbarriers that copies in flight arrive at."""
        return np.concatenate([np.zeros(0, np.int64), *(copy.slot for copy in self.loads)])

    def land_needed(self) -> bool:
        """Land what somebody waits for; whether there was any."""
        return self.land(self.c.mbarriers.needed())

    def _land(self, copy: Copy) -> None:
        c, items, n = self.c, copy.items, copy.items.size
        owners, address = copy.present()
        if copy.source is not None:
            data = c.shared.views[n].take(copy.source >> SHIFT[n])
        elif items.inside is None:
            data = c.globals.load(copy.ins, c, owners, address, n)
        else:
            data = np.broadcast_to(copy.fill, items.shared.shape).copy()
            if len(owners):
                data[items.inside] = c.globals.load(copy.ins, c, owners, address, n)
        if copy.tf32:
            data = _rounded_to_tf32(data)
        at = items.shared.reshape(-1)
        c.shared.views[n][at >> SHIFT[n]] = data.reshape(-1)
        if c.uninit is not None:
            c.uninit.stored_bytes(c.shared, at, n)
        state = c.mbarriers
        if not state.live[copy.slot].all():
            message = "a bulk copy lands on an mbarrier that has been invalidated"
            raise error(MbarrierMisuse, copy.ins, c, copy.lanes, message)
        if c.race is not None:
            if copy.source is not None:
                c.race.source_read(copy.source)
            thing, phase = state.thing[copy.slot], state.epoch[copy.slot] + 1
            c.race.bulk_land(copy.lanes, copy.chunks, thing, phase)
        size = np.int64(copy.chunks.shape[1] * _CHUNK)
        state.expect(copy.ins, copy.lanes, copy.slot, np.broadcast_to(-size, copy.slot.shape))
        state.settle(copy.ins, copy.lanes, copy.slot)

    # -- stores
    def issue_store(self, copy: Copy) -> None:
        c = self.c
        if c.race is not None:
            c.race.store_issue(copy.ins, copy.lanes, copy.chunks)
        if c.uninit is not None:
            at = copy.items.shared
            at = at.reshape(-1) if copy.items.inside is None else at[copy.items.inside]
            c.uninit.require_shared(copy.ins, copy.present()[0], at, copy.items.size)
        if self._is_early():
            self._write(copy)
        if not copy.written or c.race is not None:
            self.stores.append(copy)

    def commit(self, lanes: np.ndarray) -> None:
        self.committed[lanes] += 1

    def wait(self, lanes: np.ndarray, keep: int, only_read: bool) -> None:
        """Finish, for each lane, all but its ``keep`` newest groups; or only read their source."""
        if not self.stores:
            return
        limit = np.full(self.c.L, -1, np.int64)
        limit[lanes] = self.committed[lanes] - keep
        taken, kept = _split(self.stores, lambda copy: copy.group < limit[copy.lanes])
        for copy in taken:
            self._read(copy)
            if self.c.race is not None and not copy.awaited:
                self.c.race.store_done(copy.ins, copy.lanes, copy.chunks)
            copy.awaited = True
            if not only_read:
                self._write(copy)
        self.stores = [copy for copy in taken if not copy.written] + kept

    def _read(self, copy: Copy) -> None:
        if copy.data is None:
            n = copy.items.size
            copy.data = self.c.shared.views[n].take(copy.items.shared >> SHIFT[n])

    def _write(self, copy: Copy) -> None:
        if copy.written:
            return
        self._read(copy)
        assert copy.data is not None
        owners, address = copy.present()
        inside = copy.items.inside
        data = copy.data.reshape(-1) if inside is None else copy.data[inside]
        if len(owners):
            self.c.globals.store(copy.ins, self.c, owners, address, copy.items.size, data)
        copy.written = True
        self.c.progress += 1

    # -- the end of CTAs
    def exited(self) -> None:
        """Copies of CTAs that have ended: shared memory may not go while they still need it."""
        c = self.c
        if not (self.loads or self.stores):
            return
        ended = ~c.live.reshape(c.ctas, -1).any(1)
        per_cta = c.shared.stride
        loads, self.loads = _split(self.loads, lambda copy: copy.uses(ended, per_cta))
        stores, self.stores = _split(self.stores, lambda copy: copy.uses(ended, per_cta))
        late = loads + [copy for copy in stores if not copy.awaited]
        if late and c.race is not None:
            message = "a CTA ends while a bulk copy still uses its shared memory"
            hint = "wait for its mbarrier (loads) or with cp.async.bulk.wait_group.read (stores)"
            raise error(SharedRace, late[0].ins, c, late[0].lanes, message, hint)
        for copy in stores:
            if copy.data is not None:
                self._write(copy)


def _refuse_unknown(ins: Ins) -> None:
    unknown = [m for m in ins.mods if m not in _KNOWN]
    if unknown:
        raise ins.unsupported(f".{unknown[0]} of a bulk copy")


def _direction(ins: Ins) -> str:
    spaces = [m.split("::")[0] for m in ins.mods if m.split("::")[0] in ("shared", "global")]
    if spaces == ["shared", "global"] and "mbarrier::complete_tx::bytes" in ins.mods:
        return "load"
    if spaces == ["shared", "shared"] and "shared::cta" in ins.mods:
        return "exchange"
    if spaces == ["global", "shared"] and "bulk_group" in ins.mods:
        return "store"
    if spaces == ["global"] and "prefetch" in ins.mods:
        return "prefetch"
    raise ins.unsupported()


def _require_aligned(ins: Ins, c: Any, lanes: np.ndarray, a: np.ndarray, n: int, what: str) -> None:
    bad = a & a.dtype.type(n - 1) != 0
    if bad.any():
        message = f"{what} {int(a[bad][0]):#x} is not a multiple of {n}"
        raise error(Misaligned, ins, c, lanes[bad], message)


def _rounded_to_tf32(items: np.ndarray) -> np.ndarray:
    """Items of f32 with the low 13 bits rounded off: to nearest even; infinities and NaN stay."""
    bits = np.ascontiguousarray(items).view(np.uint32)
    rounded = bits + (0xFFF + (bits >> 13 & 1)) & np.uint32(0xFFFFE000)
    special = bits & 0x7F800000 == 0x7F800000
    return np.where(special, bits, rounded).view(items.dtype)


def _start(
    ins: Ins, c: Any, lanes: np.ndarray, items: Items, start: np.ndarray, size: int,
    slot: np.ndarray | None, fill: np.ndarray, tf32: bool = False,
    source: np.ndarray | None = None,
) -> None:  # fmt: skip
    """Check the bounds of copies whose items lie at offsets of the CTA, and issue them."""
    n, engine = items.size, c.engines["bulk"]
    owners = np.broadcast_to(lanes[:, None], items.shared.shape).reshape(-1)
    at = c.shared.index(ins, c, owners, items.shared.reshape(-1), n).reshape(items.shared.shape)
    base = (at[:, 0] - items.shared[:, 0] + start)[:, None]
    copy = Copy(
        ins,
        lanes,
        replace(items, shared=at),
        base + np.arange(0, size, _CHUNK),
        np.full(len(lanes), -1) if slot is None else slot,
        fill,
        engine.committed[lanes],
        tf32,
        source,
    )
    inside, address = copy.present()
    if len(inside) and source is None:
        c.globals.pieces(ins, c, inside, address, n, slot is None)
    kind = "store_bulk" if slot is None else "load_bulk" if source is None else "exchange_bulk"
    c.bytes[kind] += len(inside) * n
    if slot is not None:
        apart = (slot << 3) // c.shared.stride != copy.chunks[:, 0] // c.shared.stride
        if apart.any():
            message = "a bulk copy and its mbarrier are in the shared memory of different CTAs"
            raise error(MbarrierMisuse, ins, c, lanes[apart], message)
    if slot is None:
        engine.issue_store(copy)
    else:
        engine.issue_load(copy)


def _tensor(ins: Ins, kind: str) -> Step:
    """cp.async.bulk.tensor of 1 to 5 dimensions: loads and stores of boxes, and prefetches."""
    rank = next(int(m[0]) for m in ins.mods if m[:-1].isdigit() and m[-1] == "d")
    place = memory_operand(ins, 1 if kind == "load" else 0)
    coordinates = _coordinates(ins, place.extra, rank)
    maps = map_reader(ins, place, rank)
    if kind == "prefetch":
        return _only_check(maps)
    to = shared_addresser(ins, memory_operand(ins, 0 if kind == "load" else 1))
    barrier = shared_addresser(ins, memory_operand(ins, 2)) if kind == "load" else None
    spread = _multicast(ins, 3)

    def run(c: Any, ix: Any) -> None:
        ix, start = spread(c, ix, to)
        lanes = lanes_of(c, ix)
        _require_aligned(ins, c, lanes, start, _BOX_ALIGN, "shared offset of a box")
        slot = None if barrier is None else _objects(ins, c, ix, barrier, start)
        corner = [
            np.broadcast_to(read(c, ix), lanes.shape).view(np.int32).astype(np.int64)
            for read in coordinates
        ]
        for box, pick in maps(c, ix):
            at = [along[pick] for along in corner]
            items = box_items(box, start[pick], at, stores=kind == "store")
            if items.inside is not None:
                c.globals.base_of_map(ins, c, lanes[pick], box.address)
            mine = None if slot is None else slot[pick]
            fill = fill_value(box, items.size)
            size = box.box_bytes
            _start(ins, c, lanes[pick], items, start[pick], size, mine, fill, box.tf32)

    return run


def _coordinates(ins: Ins, extra: tuple[Any, ...], rank: int) -> list[Reader]:
    given = extra[0].items if len(extra) == 1 and isinstance(extra[0], Vector) else extra
    if len(given) != rank:
        raise ins.unsupported(f"{rank} coordinates expected")
    return [reader(ins, operand, 32) for operand in given]


def _straight(ins: Ins, kind: str) -> Step:
    """cp.async.bulk of consecutive bytes."""
    load, fill = kind in ("load", "exchange"), np.zeros(1, CARRIER[_CHUNK])
    space = "shared" if kind == "exchange" else "global"
    outer = addresser(ins, memory_operand(ins, 1 if load else 0), space)
    read_size = reader(ins, ins.ops[1 if kind == "prefetch" else 2], 32)
    to = barrier = None
    if kind != "prefetch":
        to = shared_addresser(ins, memory_operand(ins, 0 if load else 1))
    if load:
        barrier = shared_addresser(ins, memory_operand(ins, 3))
    spread = _multicast(ins, 4)

    def run(c: Any, ix: Any) -> None:
        ix, target = (ix, None) if to is None else spread(c, ix, to)
        lanes = lanes_of(c, ix)
        sizes = np.broadcast_to(read_size(c, ix), lanes.shape).astype(np.int64)
        address = np.broadcast_to(outer(c, ix), lanes.shape).view(np.uint64)
        _require_aligned(ins, c, lanes, sizes, _CHUNK, "size of a bulk copy")
        _require_aligned(ins, c, lanes, address, _CHUNK, f"{space} address of a bulk copy")
        slot = None if barrier is None else _objects(ins, c, ix, barrier, target)
        for size in map(int, np.unique(sizes[sizes > 0])):
            pick = np.flatnonzero(sizes == size)
            row = np.arange(0, size, _CHUNK)
            source = address[pick][:, None] + row.astype(np.uint64)
            if target is None:
                owners = np.repeat(lanes[pick], len(row))
                c.globals.pieces(ins, c, owners, source.reshape(-1), _CHUNK, False)
                continue
            start = target[pick]
            _require_aligned(ins, c, lanes[pick], start, _CHUNK, "shared offset of a bulk copy")
            items = Items(_CHUNK, start[:, None] + row, source, None)
            mine = None if slot is None else slot[pick]
            inner = _own(ins, c, lanes[pick], source) if kind == "exchange" else None
            _start(ins, c, lanes[pick], items, start, size, mine, fill, source=inner)

    return run


def _own(ins: Ins, c: Any, lanes: np.ndarray, source: np.ndarray) -> np.ndarray:
    """Chunks in the arena of shared addresses uint64 [lanes, n], which must be the CTA's own."""
    owners = np.repeat(lanes, source.shape[1])
    at = c.shared.index(ins, c, owners, source.view(np.int64).reshape(-1), _CHUNK)
    other = at // c.shared.stride != c.cta_of_lane[owners]
    if other.any():
        message = "the source of a copy within the cluster is in another CTA"
        raise error(OutOfBounds, ins, c, owners[other], message)
    return at.reshape(source.shape)


Spread = Callable[[Any, Any, Reader], tuple[Any, np.ndarray]]


def _multicast(ins: Ins, position: int) -> Spread:
    """callable(chunk, ix, address reader) -> (lanes, shared address of the target) of the copies.

    With .multicast::cluster a lane makes a copy for each CTA in its mask, to the same offset.
    """
    if "multicast::cluster" not in ins.mods:
        return lambda c, ix, to: (ix, np.broadcast_to(to(c, ix), lanes_of(c, ix).shape))
    read = reader(ins, ins.ops[position], 16)

    def spread(c: Any, ix: Any, to: Reader) -> tuple[Any, np.ndarray]:
        lanes, size = lanes_of(c, ix), c.grid.size
        mask = np.broadcast_to(read(c, ix), lanes.shape).astype(np.int64)
        bad = (mask == 0) | (mask >> size != 0)
        if bad.any():
            message = f"multicast mask {int(mask[bad][0]):#x} in a cluster of {size}"
            raise error(OutOfBounds, ins, c, lanes[bad], message)
        origin, rank = np.nonzero(mask[:, None] >> np.arange(size) & 1)
        start = np.broadcast_to(to(c, ix), lanes.shape)[origin]
        return lanes[origin], start if size == 1 else mapped(start, rank)

    return spread


def _objects(ins: Ins, c: Any, ix: Any, barrier: Reader, target: np.ndarray) -> np.ndarray:
    """The mbarriers of copies; multicast ones at the same offset in the CTA of each target."""
    address = barrier(c, ix)
    if "multicast::cluster" in ins.mods and c.grid.size > 1:
        lanes, memory = lanes_of(c, ix), c.shared.cluster
        address = mapped(address, memory.owner(lanes, target) - memory.first[lanes])
    found: np.ndarray = c.mbarriers.find(ins, c, ix, address, True)
    return found


def cp(ins: Ins) -> Step:
    """All of cp.async.bulk."""
    if "commit_group" in ins.mods:
        return lambda c, ix: c.engines["bulk"].commit(lanes_of(c, ix))
    if "wait_group" in ins.mods:
        keep, only_read = ins.ops[0].value, "read" in ins.mods
        return lambda c, ix: c.engines["bulk"].wait(lanes_of(c, ix), keep, only_read)
    _refuse_unknown(ins)
    return (_tensor if "tensor" in ins.mods else _straight)(ins, _direction(ins))


def prefetch(ins: Ins) -> Step:
    """prefetch and prefetchu have no effect; that of a tensor map checks the map."""
    if "tensormap" not in ins.mods:
        return lambda c, ix: None
    return _only_check(map_reader(ins, memory_operand(ins, 0), None))


def _only_check(maps: MapReader) -> Step:
    def run(c: Any, ix: Any) -> None:
        maps(c, ix)

    return run


RULES: dict[str, Callable[[Ins], Step]] = {
    "cp.async.bulk": cp,
    "prefetch": prefetch,
    "prefetchu": prefetch,
}
