"""setmaxnreg: warpgroups give registers back to their CTA's pool and take more from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minitriton.runtime.emulator.barriers import require_whole_warps
from minitriton.runtime.emulator.checks import DivergentAligned, RegisterPool
from minitriton.runtime.emulator.memory import error
from minitriton.runtime.emulator.module import Ins
from minitriton.runtime.emulator.operands import lanes_of
from minitriton.runtime.emulator.syntax import Immediate

_FILE, _STEP, _LEAST, _MOST = 1 << 16, 8, 24, 256
_GROUP = 4  # warps of a warpgroup


class Pool:
    """Registers per thread of each warp, and what each CTA has free.

    A CTA starts with all its registers given out: an equal share of 64 K per thread, rounded down
    to a multiple of 8 and at most 256.
    """

    def __init__(self, chunk: Any) -> None:
        self.c = chunk
        self.warps = chunk.padded >> 5
        share = min(_FILE // chunk.padded // _STEP * _STEP, _MOST)
        self.owned = np.full(chunk.L >> 5, share)
        self.free = np.zeros(chunk.ctas, np.int64)
        self.wanted = np.zeros(chunk.L >> 5, np.int64)  # of warps at a setmaxnreg
        self.asking = np.zeros(chunk.L >> 5, bool)
        local = np.arange(chunk.L >> 5) % self.warps
        self.group = np.arange(chunk.L >> 5) // self.warps * -(-self.warps // _GROUP)
        self.group += local // _GROUP

    def ask(self, ins: Ins, lanes: np.ndarray, count: int) -> bool:
        """The warps of ``lanes`` want ``count`` registers per thread; True if all have got them."""
        warps = np.unique(lanes >> 5)
        wrong = self.owned[warps] > count if "inc" in ins.mods else self.owned[warps] < count
        if wrong.any():
            has = int(self.owned[warps][wrong][0])
            message = (
                f"a thread with {has} registers cannot go to {count} by {ins.op}.{ins.mods[0]}"
            )
            raise error(RegisterPool, ins, self.c, warps[wrong] * 32, message)
        self.asking[warps], self.wanted[warps] = True, count
        self._same_request(ins, warps)
        self.c.park(lanes, ins.pc, self)
        self.recheck()
        return False

    def _same_request(self, ins: Ins, warps: np.ndarray) -> None:
        for group in np.unique(self.group[warps]):
            members = np.flatnonzero((self.group == group) & self.asking)
            if len(np.unique(self.wanted[members])) > 1:
                hint = "all warps of a warpgroup must execute the same setmaxnreg"
                message = "warps of one warpgroup ask for different register counts"
                raise error(DivergentAligned, ins, self.c, members * 32, message, hint)

    def recheck(self) -> None:
        """Serve the warpgroups that are complete, those that give before those that take."""
        if not self.asking.any():
            return
        c = self.c
        alive = c.live.reshape(-1, 32).any(1)
        missing = np.bincount(self.group, alive & ~self.asking) > 0
        change = np.bincount(self.group, (self.wanted - self.owned) * alive * self.asking) * 32
        complete = np.unique(self.group[self.asking])
        complete = complete[~missing[complete]]
        for group in complete[np.argsort(change[complete], kind="stable")]:
            members = np.flatnonzero((self.group == group) & self.asking)
            cta = members[0] // self.warps
            if change[group] > self.free[cta]:
                continue
            self.free[cta] -= int(change[group])
            self.owned[members] = self.wanted[members]
            self.asking[members] = False
            lanes = (members[:, None] * 32 + np.arange(32)).reshape(-1)
            c.unpark(lanes[c.live[lanes]])
            c.progress += 1

    def describe(self, lane: int) -> str:
        warp = lane >> 5
        members = self.group == self.group[warp]
        alive = self.c.live.reshape(-1, 32).any(1)
        if (members & alive & ~self.asking).any():
            here, need = int((members & self.asking).sum()), int((members & alive).sum())
            return f"setmaxnreg: {here} of {need} warps of the warpgroup arrived"
        free = int(self.free[warp // self.warps])
        more = int((self.wanted - self.owned)[members & self.asking].sum()) * 32
        return f"setmaxnreg: {more} more registers, of which the CTA has {free} free"


def setmaxnreg(ins: Ins) -> Callable[[Any, Any], bool]:
    """setmaxnreg.inc and .dec; see `decode.Blocking`."""
    count = ins.ops[0].value if isinstance(ins.ops[0], Immediate) else 0
    if ins.mods[0] not in ("inc", "dec") or count % _STEP or not _LEAST <= count <= _MOST:
        raise ins.unsupported(f"a literal multiple of {_STEP} in {_LEAST} .. {_MOST} is required")

    def run(c: Any, ix: Any) -> bool:
        lanes = lanes_of(c, ix)
        if "align" in c.checks:
            require_whole_warps(ins, c, lanes)
        return c.pool.ask(ins, lanes, count)

    return run
