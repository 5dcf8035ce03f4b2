"""Running a chunk: which lanes execute next, divergence, waiting, and deadlock.

Within a warp the lanes at the lowest pc go first, so that paths reconverge where they meet.
Between warps the one that has jumped back least goes first (then the lowest pc), so that a
spinning warp cannot starve the one it waits for, and warps at the same place execute together.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minitriton.runtime.emulator.blocks import Run, is_warp_wide
from minitriton.runtime.emulator.checks import Deadlock, DivergentAligned, StepLimit
from minitriton.runtime.emulator.chunk import NOT_READY, Chunk
from minitriton.runtime.emulator.decode import Blocking, Branch, Exit
from minitriton.runtime.emulator.memory import error
from minitriton.runtime.emulator.module import Ins
from minitriton.runtime.emulator.operands import reader
from minitriton.runtime.emulator.warp import FULL_MASK, mask_operand

#: Jumps back without any change of memory after which a chunk lets the others run.
SPIN_LIMIT = 4000
_STICKY_LIMIT = 64
#: Jumps back of a split warp without any change of memory after which its other lanes go first:
#: the lanes at the lowest pc may be waiting for them (a lock between lanes of one warp).
_SPLIT_LIMIT = 5000


class Meeting:
    """What lanes wait for at a warp-wide instruction: the other lanes it names."""

    def __init__(self, ins: Ins) -> None:
        self.ins = ins

    def describe(self, lane: int) -> str:
        return f"{self.ins.op}.sync names lanes of its warp that never arrive"


class Scheduler:
    """Executes one chunk to its end, or until it spins."""

    def __init__(self, chunk: Chunk) -> None:
        self.c = chunk
        self.blocks, self.program = chunk.launch.blocks, chunk.launch.program
        self.schedule = chunk.launch.schedule
        self.last_progress = 0
        self.spins = 0
        self.sticky: np.ndarray | None = None
        self.sticky_jumps = 0
        self.at_meeting = np.zeros(chunk.L, bool)  # parked at a warp-wide instruction
        self.highest_first = False
        self.split_jumps = 0
        self.split_progress = 0

    def run(self) -> bool:
        """Advance; True when all lanes have exited, False when spinning without progress."""
        c = self.c
        self.spins = 0
        while True:
            if c.uniform:
                pc, lanes, whole = c.pc, None, True
            else:
                picked = self._pick()
                if picked is None:
                    return True
                pc, lanes, whole = picked
            self._advance(pc, lanes, whole)
            if self.spins > SPIN_LIMIT:
                if c.progress == self.last_progress and not c.land_needed():
                    return False
                self.last_progress, self.spins = c.progress, 0

    def _advance(self, pc: int, lanes: np.ndarray | None, whole: bool) -> None:
        c = self.c
        if not whole and is_warp_wide(self.program.code[pc]):
            assert lanes is not None
            met = self._meet(self.program.code[pc], lanes)
            if met is None:
                return
            lanes = met
        if not whole:
            self._watch_split()
        uninit = c.uninit
        trace = 0 if uninit is None else (2 if uninit.lanes else 1)
        run = self.blocks.get(pc, lanes is None, whole, trace)
        self._count(run, lanes)
        if uninit is not None and trace == 2:
            uninit.before(self.program.code[pc], lanes)
        if run.fn is not None:
            run.fn(c, lanes)
            if uninit is not None and trace == 2:
                uninit.after(self.program.code[pc], lanes)
        control = run.control
        if control is None:
            self._move(lanes, run.end)
            return
        if isinstance(control, Branch):
            self._branch(control, run.end, lanes)
        elif isinstance(control, Exit):
            self._exit(control, run.end, lanes)
        else:
            self._block(control, run.end, lanes)

    def _watch_split(self) -> None:
        """Change sides when lanes of a split warp spin for lanes that are held back."""
        if self.c.progress != self.split_progress:
            self.split_progress, self.split_jumps = self.c.progress, self.spins
        elif self.spins - self.split_jumps > _SPLIT_LIMIT or self.spins < self.split_jumps:
            self.split_jumps = self.spins
            self.highest_first = not self.highest_first

    def _count(self, run: Run, lanes: np.ndarray | None) -> None:
        launch = self.c.launch
        launch.steps += 1
        if launch.max_steps is not None and launch.steps > launch.max_steps:
            ins = self.program.code[run.start]
            message = f"more than {launch.max_steps} steps"
            raise StepLimit(message, line=ins.line, location=ins.loc)
        count = self.c.L if lanes is None else len(lanes)
        run.lanes += count
        run.warps += (count + 31) >> 5
        self.c.clock += run.end - run.start + 1

    def _move(self, lanes: np.ndarray | None, pc: int) -> None:
        if self.c.uniform:
            self.c.pc = pc
        elif lanes is None:
            self.c.key[:] = pc
        else:
            self.c.key[lanes] = pc

    # -- choosing
    def _pick(self) -> tuple[int, np.ndarray | None, bool] | None:
        """(pc, lanes or None for all, whole warps?) of the fragment to execute next."""
        c = self.c
        table = c.key.reshape(-1, 32)
        lowest = table.min(1)
        ready = lowest < NOT_READY
        if self.highest_first:
            lowest = np.where(table < NOT_READY, table, -1).max(1)
        if not ready.any():
            if not c.live.any():
                return None
            if c.land_needed():
                return self._pick()
            self._stuck()
        warps = self._choose(lowest, ready)
        mask = (table == lowest[:, None]) & warps[:, None]
        lanes = np.flatnonzero(mask)
        pc = int(c.key[lanes[0]])
        if len(lanes) == c.L:
            if self.schedule == "round_robin":
                c.uniform, c.pc = True, pc
            return pc, None, True
        whole = len(lanes) == int(np.count_nonzero(c.live.reshape(-1, 32)[warps]))
        return pc, lanes, whole

    def _choose(self, lowest: np.ndarray, ready: np.ndarray) -> np.ndarray:
        """The mask of warps to run: all at one pc."""
        c = self.c
        candidates = ready
        if self.schedule != "round_robin":
            candidates = self._stick(ready)
        rank = np.where(candidates, (c.age << 21) + lowest, NOT_READY << 21)
        pc = lowest[int(rank.argmin())]
        return candidates & (lowest == pc)

    def _stick(self, ready: np.ndarray) -> np.ndarray:
        """Policies other than round robin let a set of warps run until it has to wait."""
        if self.sticky is not None and self.sticky_jumps < _STICKY_LIMIT:
            rest = self.sticky & ready
            if rest.any():
                return rest
        elif self.sticky is not None:
            # It may be spinning for a warp that has come less far.
            table = np.where(ready, self.c.age, NOT_READY).reshape(self.c.ctas, -1)
            ready = ready & (table == table.min(1, keepdims=True)).reshape(-1)
        self.sticky_jumps = 0
        if self.schedule == "reverse":
            table = ready.reshape(self.c.ctas, -1)
            last = table.shape[1] - 1 - table[:, ::-1].argmax(1)
            chosen = np.zeros_like(table)
            chosen[np.arange(len(table)), last] = True
            self.sticky = chosen.reshape(-1) & ready
        else:
            self.sticky = ready & (self.c.rng.random(len(ready)) < 0.5)
            if not self.sticky.any():
                self.sticky = ready.copy()
        return self.sticky

    # -- control
    def _taken(self, ins: Ins, lanes: np.ndarray | None) -> np.ndarray | bool:
        """Which lanes a guard lets through: True for all, False for none, or a mask."""
        if ins.guard is None:
            return True
        reg, negate = ins.guard
        row = self.c.rows[reg.index] if lanes is None else self.c.rows[reg.index][lanes]
        count = np.count_nonzero(row)
        if count == len(row):
            return not negate
        if count == 0:
            return negate
        return ~row if negate else row

    def _branch(self, control: Branch, pc: int, lanes: np.ndarray | None) -> None:
        ins, c = control.ins, self.c
        if control.index is not None:
            self._table_jump(control, pc, lanes)
            return
        taken = self._taken(ins, lanes)
        target = ins.targets[0]
        if taken is True:
            self._jumped(pc, target, lanes)
            self._move(lanes, target)
        elif taken is False:
            self._move(lanes, pc + 1)
        else:
            c.split()
            own = c.all_lanes if lanes is None else lanes
            self._jumped(pc, target, own[taken])
            c.key[own] = np.where(taken, target, pc + 1)

    def _table_jump(self, control: Branch, pc: int, lanes: np.ndarray | None) -> None:
        c = self.c
        c.split()
        own = c.all_lanes if lanes is None else lanes
        index = np.broadcast_to(control.index(c, own), own.shape)  # type: ignore[misc]  # _branch saw it
        targets = np.array(control.ins.targets)
        if (index >= len(targets)).any():
            bad = own[index >= len(targets)]
            raise error(Deadlock, control.ins, c, bad, "brx.idx index outside its table")
        taken = self._taken(control.ins, own)
        c.key[own] = np.where(taken, targets[index], pc + 1)
        self._jumped(pc, int(targets[index].min()), own)

    def _jumped(self, pc: int, target: int, lanes: np.ndarray | None) -> None:
        if target > pc:
            return
        self.spins += 1
        self.sticky_jumps += 1
        if lanes is not None and not self.c.uniform:
            warps = np.zeros(len(self.c.age), bool)
            warps[lanes >> 5] = True
            self.c.age += warps

    def _exit(self, control: Exit, pc: int, lanes: np.ndarray | None) -> None:
        c = self.c
        taken = self._taken(control.ins, lanes)
        if taken is False:
            self._move(lanes, pc + 1)
            return
        c.split()
        own = c.all_lanes if lanes is None else lanes
        if taken is not True:
            c.key[own] = pc + 1
            own = own[taken]
        c.exit(own)

    def _block(self, control: Blocking, pc: int, lanes: np.ndarray | None) -> None:
        c = self.c
        taken = self._taken(control.ins, lanes)
        if taken is False:
            self._move(lanes, pc + 1)
        elif taken is True:
            if control.arrive(c, lanes):
                self._move(lanes, pc + 1)
        else:
            c.split()
            own = c.all_lanes if lanes is None else lanes
            c.key[own] = pc + 1
            inside = own[taken]
            c.key[inside] = pc
            if control.arrive(c, inside):
                self._move(inside, pc + 1)

    # -- warp-wide instructions in split warps
    def _meet(self, ins: Ins, lanes: np.ndarray) -> np.ndarray | None:
        """Gather the lanes a warp-wide instruction names; parks those that are too early.

        Returns the lanes that can execute it now, or None.
        """
        c = self.c
        if ins.guard is not None:
            taken = self._taken(ins, lanes)
            skipping = lanes if taken is False else lanes[:0] if taken is True else lanes[~taken]
            c.key[skipping] = ins.pc + 1
            lanes = np.setdiff1d(lanes, skipping, assume_unique=True)
            if not len(lanes):
                return None
        waiting = (c.key == NOT_READY) & c.live & (c.lane_pc == ins.pc)
        waiting &= self.at_meeting
        present = waiting
        present[lanes] = True
        present &= np.repeat(np.bincount(lanes >> 5, minlength=c.L >> 5) > 0, 32)
        group = np.flatnonzero(present)
        operand = mask_operand(ins)
        named = np.full(len(group), FULL_MASK, np.uint32)
        if operand is not None:
            named[:] = reader(ins, operand, 32)(c, group)
        need = (named & _bits(c.live)[group >> 5]) & ~_bits(present)[group >> 5]
        ready = need == 0
        if not ready.all() and operand is None and ins.op not in ("shfl", "vote"):
            raise self._partial(ins, group[~ready])
        # A warp goes when every one of its lanes that is here is satisfied.
        blocked = np.zeros(c.L >> 5, bool)
        blocked[group[~ready] >> 5] = True
        go, stay = group[~blocked[group >> 5]], group[blocked[group >> 5]]
        satisfied = stay[ready[blocked[group >> 5]]]
        go = np.sort(np.concatenate([go, satisfied]))
        stay = np.setdiff1d(stay, satisfied, assume_unique=True)
        if len(stay):
            c.park(stay, ins.pc, Meeting(ins))
        c.key[go] = ins.pc
        self.at_meeting[go] = False
        self.at_meeting[stay] = True
        return go if len(go) else None

    def _partial(self, ins: Ins, lanes: np.ndarray) -> Exception:
        message = f"{ins.op} is executed by part of a warp"
        hint = "all lanes of the warp must reach an .aligned instruction together"
        return error(DivergentAligned, ins, self.c, lanes, message, hint)

    def _stuck(self) -> None:
        """Nothing is ready although lanes are alive: explain what each group waits for."""
        c = self.c
        parked = np.flatnonzero(c.live)
        at_meeting = parked[self.at_meeting[parked]]
        elsewhere = parked[~self.at_meeting[parked]]
        # Lanes whose warp waits elsewhere are kept by that.
        at_meeting = at_meeting[~np.isin(at_meeting >> 5, elsewhere >> 5)]
        if len(at_meeting):
            ins = self.program.code[int(c.lane_pc[at_meeting[0]])]
            hint = "the membermask must name exactly the lanes that reach the instruction"
            message = "a warp-wide instruction names lanes that never reach it"
            raise error(DivergentAligned, ins, c, at_meeting, message, hint)
        reasons: dict[tuple[int, str], list[str]] = {}
        for lane in parked:
            pc = int(c.lane_pc[lane])
            if pc in c.parked_on and len(reasons) < 64:
                key = pc, c.parked_on[pc].describe(int(lane))
                reasons.setdefault(key, []).append(c.lane_name(int(lane)))
        lines = []
        for (pc, reason), names in list(reasons.items())[:6]:
            ins = self.program.code[pc]
            place = f"{ins.loc[0]}:{ins.loc[1]}, " if ins.loc else ""
            lines.append(f"{names[0]} waits at {place}PTX line {ins.line} for {reason}")
        first = self.program.code[int(c.lane_pc[parked[0]])]
        message = "no thread can go on: " + "; ".join(lines)
        hint = "every thread that the barrier counts must reach it"
        raise error(Deadlock, first, c, parked, message, hint, waiting=lines)


def _bits(mask: np.ndarray) -> np.ndarray:
    """Per warp, the uint32 of a lane mask."""
    return np.packbits(mask.reshape(-1, 32), axis=1, bitorder="little").view(np.uint32)[:, 0]


def describe_state(c: Any) -> bytes:
    """A digest of all registers, to recognise a chunk that cannot change any more."""
    import hashlib

    digest = hashlib.blake2b(digest_size=16)
    for row in c.rows:
        digest.update(row.tobytes())
    digest.update(c.key.tobytes() if not c.uniform else str(c.pc).encode())
    return digest.digest()
