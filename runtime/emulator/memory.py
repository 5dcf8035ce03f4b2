"""Memory behind the emulated address spaces, with exact bounds.

Global memory is the process's own memory, seen through registered allocations only. Shared and
local memory are arenas: one buffer per chunk of CTAs, addressed by offset within the CTA or lane.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from minitriton.runtime.emulator.checks import EmulatorError, Misaligned, OutOfBounds
from minitriton.runtime.emulator.module import WINDOW_SHIFT, Ins
from minitriton.runtime.emulator.operands import lanes_of

#: Element type used to move n bytes at once; complex128 stands for any 16 bytes.
CARRIER = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32),
           8: np.dtype(np.uint64), 16: np.dtype(np.complex128), 32: np.dtype("V32")}  # fmt: skip
SHIFT = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4, 32: 5}
_SPACES = {1: "shared", 2: "local", 3: "parameter"}


@dataclass(frozen=True, slots=True)
class Allocation:
    """Host memory a kernel may touch: ``nbytes`` from ``address``."""

    address: int
    nbytes: int
    name: str = ""
    writable: bool = True


def error(
    kind: type[EmulatorError],
    ins: Ins,
    c: Any,
    lanes: Any,
    message: str,
    hint: str = "",
    **details: Any,
) -> EmulatorError:
    """An error at ``ins`` with up to three of the ``lanes`` named."""
    examples = [c.lane_name(int(lane)) for lane in np.asarray(lanes)[:3]]
    facts = {"examples": examples, "count": len(lanes), "ptx": ins.text, **details}
    if ins.chain:
        facts["called_from"] = ins.chain
    return kind(message, line=ins.line, location=ins.loc, hint=hint, details=facts)


class _Region:
    """One allocation with a typed view per access size."""

    def __init__(self, allocation: Allocation) -> None:
        self.allocation = allocation
        self.start, self.size = allocation.address, allocation.nbytes
        self.end = self.start + self.size
        raw = (ctypes.c_uint8 * self.size).from_address(self.start)
        self.bytes = np.frombuffer(raw, np.uint8)
        self.views: dict[int, tuple[np.uint64, np.ndarray]] = {}

    def view(self, n: int) -> tuple[np.uint64, np.ndarray]:
        """The first n-aligned address and the whole n-byte items from there."""
        if n not in self.views:
            skip = -self.start % n
            count = max(0, (self.size - skip) // n)
            items = self.bytes[skip : skip + count * n].view(CARRIER[n])
            self.views[n] = (np.uint64(self.start + skip), items)
        return self.views[n]


class GlobalMemory:
    """All registered allocations of a launch, found by address."""

    def __init__(self, allocations: list[Allocation]) -> None:
        kept = sorted((a for a in allocations if a.nbytes > 0), key=lambda a: a.address)
        self.regions = [_Region(a) for a in kept]
        self.starts = np.array([r.start for r in self.regions], np.uint64)
        self.ends = np.array([r.end for r in self.regions], np.uint64)
        self.recent: dict[int, _Region] = {}

    def pieces(self, ins: Ins, c: Any, ix: Any, a: np.ndarray, n: int, write: bool) -> Any:
        """Yield (region, selector or None) for the n-byte accesses at addresses ``a``."""
        low, high = int(a.min()), int(a.max())
        if n > 1 and int(np.bitwise_or.reduce(a)) & (n - 1):
            bad = np.flatnonzero(a & np.uint64(n - 1))
            raise misaligned(ins, c, ix, bad, f"global address {int(a[bad[0]]):#x}", n)
        region = self.recent.get(ins.pc)
        if region is None or low < region.start or high + n > region.end:
            region = self._single(low, high, n)
        if region is not None:
            self.recent[ins.pc] = region
            if write and not region.allocation.writable:
                raise self._read_only(ins, c, ix, region)
            return ((region, None),)
        return self._many(ins, c, ix, a, n, write)

    def _single(self, low: int, high: int, n: int) -> _Region | None:
        k = int(np.searchsorted(self.starts, np.uint64(low), "right")) - 1
        if k >= 0 and high + n <= self.regions[k].end:
            return self.regions[k]
        return None

    def _many(self, ins: Ins, c: Any, ix: Any, a: np.ndarray, n: int, write: bool) -> Any:
        which = np.searchsorted(self.starts, a, "right") - 1
        ends = self.ends[which] if len(self.ends) else np.zeros(len(a), np.uint64)
        bad = np.flatnonzero((which < 0) | (a + np.uint64(n) > ends))
        if len(bad):
            raise self._outside(ins, c, ix, bad, a, n, write)
        found = []
        for k in np.unique(which):
            region = self.regions[k]
            if write and not region.allocation.writable:
                raise self._read_only(ins, c, ix, region)
            found.append((region, np.flatnonzero(which == k)))
        return found

    def load(self, ins: Ins, c: Any, ix: Any, a: np.ndarray, n: int) -> np.ndarray:
        """The n-byte items at uint64 addresses ``a``."""
        pieces = self.pieces(ins, c, ix, a, n, False)
        out = None
        for region, selector in pieces:
            first, items = region.view(n)
            part = a if selector is None else a[selector]
            got = items.take(((part - first) >> np.uint64(SHIFT[n])).view(np.int64))
            if selector is None:
                return got
            if out is None:
                out = np.empty(len(a), CARRIER[n])
            out[selector] = got
        assert out is not None
        return out

    def store(self, ins: Ins, c: Any, ix: Any, a: np.ndarray, n: int, value: np.ndarray) -> None:
        """Write n-byte items (shape [lanes]) to uint64 addresses; the last of equals wins."""
        for region, selector in self.pieces(ins, c, ix, a, n, True):
            first, items = region.view(n)
            part = a if selector is None else a[selector]
            where = ((part - first) >> np.uint64(SHIFT[n])).view(np.int64)
            items[where] = value if selector is None else value[selector]

    def read_string(self, address: int, limit: int = 4096) -> bytes:
        """The zero-terminated string at ``address`` (empty when it is not ours)."""
        region = self._single(address, address, 1)
        if region is None:
            return b""
        at = address - region.start
        return bytes(region.bytes[at : at + limit]).split(b"\0", 1)[0]

    def _outside(
        self, ins: Ins, c: Any, ix: Any, bad: np.ndarray, a: np.ndarray, n: int, write: bool
    ) -> EmulatorError:
        address = int(a[bad[0]])
        lanes = lanes_of(c, ix)[bad]
        verb = "write" if write else "read"
        message = f"{n}-byte global {verb} at {address:#x} {self._describe(address, n)}"
        hint = "mask the access so that every active lane stays inside the tensor"
        return error(OutOfBounds, ins, c, lanes, message, hint, address=address, nbytes=n)

    def base_of_map(self, ins: Ins, c: Any, lanes: np.ndarray, address: int) -> None:
        """Refuses a tensor map that begins outside of all allocations, for a box that lies partly
        outside of the map: an H200 then reported an illegal address."""
        if self._single(address, address, 1) is None:
            message = (
                f"a box lies partly outside of its tensor map, whose base address {address:#x} "
                f"{self._describe(address, 1)}"
            )
            raise error(OutOfBounds, ins, c, lanes, message, "begin the map at the tensor")

    def _describe(self, address: int, n: int) -> str:
        if address < 4096:
            return "(null pointer)"
        if address >> WINDOW_SHIFT in _SPACES:
            return f"(a generic {_SPACES[address >> WINDOW_SHIFT]} address)"
        best, text = 1 << 62, "hits no allocation"
        for r in self.regions:
            name = r.allocation.name or f"allocation {r.start:#x}"
            if address + n > r.end and address + n - r.end < best:
                best = address + n - r.end
                text = f"ends {best} bytes past the end of {name!r} ({r.size} bytes)"
            elif address < r.start and r.start - address < best:
                best = r.start - address
                text = f"starts {best} bytes before {name!r} ({r.size} bytes)"
        return text

    def _read_only(self, ins: Ins, c: Any, ix: Any, region: _Region) -> EmulatorError:
        message = f"write to read-only memory {region.allocation.name!r}"
        return error(OutOfBounds, ins, c, lanes_of(c, ix), message)


def misaligned(ins: Ins, c: Any, ix: Any, bad: np.ndarray, what: str, n: int) -> EmulatorError:
    lanes = lanes_of(c, ix)[bad]
    hint = f"vector accesses need natural alignment; {n} bytes here"
    return error(Misaligned, ins, c, lanes, f"{what} is not {n}-byte aligned", hint)


class Arena:
    """Shared or local memory of a chunk: ``size`` bytes for each owner (CTA or lane)."""

    def __init__(self, name: str, size: int, owners: int, owner_of_lane: np.ndarray) -> None:
        self.name, self.size = name, size
        self.stride = max(16, (size + 15) // 16 * 16)
        self.base = owner_of_lane.astype(np.int64) * self.stride
        total = owners * self.stride
        # 0x7FF8 patterns read as NaN in every float width, so a missing store shows.
        self.bytes = np.full((total + 15) // 16 * 2, 0x7FFF_7FFF_7FFF_7FFF, np.uint64).view(
            np.uint8
        )
        self.views = {n: self.bytes.view(CARRIER[n]) for n in (1, 2, 4, 8, 16)}
        self.defined: Arena | None = None
        #: Refuses accesses to live mbarriers, which lie in this range of offsets.
        self.guard: Callable[[Ins, Any, np.ndarray, int], None] | None = None
        self.guarded = (1 << 62, 0)
        #: Shared memory of clusters of several CTAs: finds the CTA that an address names.
        self.cluster: Any = None

    def track_definedness(self, owner_count: int) -> None:
        """Keep a byte of 0xFF beside each byte that has been written."""
        shadow = object.__new__(Arena)
        shadow.bytes = np.zeros(len(self.bytes), np.uint8)
        shadow.views = {n: shadow.bytes.view(CARRIER[n]) for n in (1, 2, 4, 8)}
        self.defined = shadow

    def index(
        self, ins: Ins, c: Any, ix: Any, a: np.ndarray, n: int, guarded: bool = True
    ) -> np.ndarray:
        """Byte offsets int64 [lanes] into the arena of accesses at int64 offsets ``a``."""
        low, high = int(a.min()), int(a.max()) + n
        base = None
        if self.cluster is not None and high > self.size:
            a, cta = self.cluster.locate(ins, ix, a)
            base, low, high = cta * self.stride, int(a.min()), int(a.max()) + n
        if low < 0 or high > self.size:
            bad = np.flatnonzero((a < 0) | (a + n > self.size))
            at = int(a[bad[0]])
            hint = "pass enough dynamic shared memory" if self.name == "shared" else ""
            message = f"{n}-byte {self.name} access at offset {at:#x} of {self.size} bytes"
            lanes = np.broadcast_to(lanes_of(c, ix), np.broadcast_shapes(a.shape, (c.count(ix),)))
            raise error(OutOfBounds, ins, c, lanes[bad], message, hint, address=at, nbytes=n)
        if n > 1 and int(np.bitwise_or.reduce(a)) & (n - 1):
            bad = np.flatnonzero(a & (n - 1))
            raise misaligned(ins, c, ix, bad, f"{self.name} offset {int(a[bad[0]]):#x}", n)
        if base is None:
            base = self.base if ix is None else self.base[ix]
        at = a + base
        if guarded and self.guard and low < self.guarded[1] and high > self.guarded[0]:
            self.guard(ins, ix, at, n)
        return at
