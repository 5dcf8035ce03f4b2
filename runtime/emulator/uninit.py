"""Undefined values: registers and shared or local bytes that nobody wrote.

Undefined bytes make the loaded register undefined for its lane; moves pass that on byte by byte,
arithmetic as a whole; using it as an address, a branch condition, or as a value stored to global
memory is the error. While no register is undefined, execution runs at full speed; otherwise it goes
one instruction at a time. Products of tensor cores and votes are taken as defined (their inputs mix
many lanes).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minitriton.runtime.emulator.byte_masks import ALL, moved, type_bytes
from minitriton.runtime.emulator.checks import UninitialisedRead
from minitriton.runtime.emulator.memory import SHIFT, Arena, error
from minitriton.runtime.emulator.module import Ins, Mem, Program, Reg
from minitriton.runtime.emulator.operands import lanes_of, reader
from minitriton.runtime.emulator.syntax import Group, Not, Pair, Vector
from minitriton.runtime.emulator.warp import shuffle_sources

_NO_DEST_NAMES = (
    "st red bra brx ret exit trap cp call stmatrix prefetch prefetchu fence membar bar "
    "barrier nanosleep discard applypriority griddepcontrol brkpt pmevent setmaxnreg"
)
_NO_DEST = frozenset(_NO_DEST_NAMES.split())
_ADDRESSES = frozenset({"ld", "ldu", "st", "atom", "red", "cp", "ldmatrix", "stmatrix",
                        "mbarrier"})  # fmt: skip
_DEFINED_RESULT = frozenset({"mma", "wgmma", "vote", "redux", "match", "elect", "activemask", "ld",
                             "ldu", "ldmatrix", "atom", "mbarrier"})  # fmt: skip


def registers_in(operand: Any) -> list[Reg]:
    """Every register named by an operand."""
    if isinstance(operand, Reg):
        return [operand]
    if isinstance(operand, Vector | Group):
        return [r for item in operand.items for r in registers_in(item)]
    if isinstance(operand, Pair):
        return registers_in(operand.first) + registers_in(operand.second)
    if isinstance(operand, Not):
        return registers_in(operand.operand)
    if isinstance(operand, Mem):
        return registers_in(operand.base) + [r for e in operand.extra for r in registers_in(e)]
    return []


def has_dest(ins: Ins) -> bool:
    """Whether the first operand is written."""
    if ins.op in ("bar", "barrier"):
        return "red" in ins.mods
    if ins.op == "mbarrier":
        return not isinstance(ins.ops[0], Mem)
    if ins.op == "wgmma":
        return "mma_async" in ins.mods
    return ins.op not in _NO_DEST


def maybe_undefined(program: Program) -> tuple[int, ...]:
    """Registers that some path reads before any unpredicated write (definite assignment)."""
    code = program.code
    everything = (1 << len(program.registers)) - 1
    before = [everything] * (len(code) + 1)
    before[0] = 0
    work, result = [0], 0
    while work:
        pc = work.pop()
        state = before[pc]
        while pc < len(code):
            ins = code[pc]
            if has_dest(ins) and ins.guard is None:
                for reg in registers_in(ins.ops[0]) if ins.ops else ():
                    state |= 1 << reg.index
            successors = list(ins.targets)
            if not (ins.op in ("bra", "brx", "ret", "exit") and ins.guard is None):
                successors.append(pc + 1)
            changed = [s for s in successors if before[s] & state != before[s]]
            for s in changed:
                before[s] &= state
            work.extend(changed[1:])
            if not changed:
                break
            pc, state = changed[0], before[changed[0]]
    for pc, ins in enumerate(code):
        for reg in _uses(ins):
            if not before[pc] >> reg.index & 1:
                result |= 1 << reg.index
    return tuple(i for i in range(len(program.registers)) if result >> i & 1)


def _uses(ins: Ins) -> list[Reg]:
    operands = ins.ops[1:] if has_dest(ins) else ins.ops
    used = [r for o in operands for r in registers_in(o)]
    return used + ([ins.guard[0]] if ins.guard else [])


class UninitTracker:
    """Which bytes (as masks, see byte_masks) of which lanes and registers are undefined."""

    def __init__(self, chunk: Any) -> None:
        self.c = chunk
        undefined = chunk.launch.entry_undefined
        self.lanes: dict[int, np.ndarray] = {i: np.full(chunk.L, ALL, np.uint8) for i in undefined}
        self.fresh: list[tuple[np.ndarray, np.ndarray]] = []  # lanes, masks of the loaded bytes
        self.bad_store: np.ndarray | None = None  # by lane, mask of the bytes to be stored
        chunk.shared.track_definedness(0)
        chunk.local.track_definedness(0)

    # -- memory
    def loaded_bytes(self, arena: Arena, at: np.ndarray, n: int, lanes: np.ndarray) -> None:
        """Remember which ``lanes`` read which bytes that were never written."""
        if self._undefined(arena, at, n).any():
            self.fresh.append((lanes, self._undefined_bytes(arena, at, n)))

    def _undefined(self, arena: Arena, at: np.ndarray, n: int) -> np.ndarray:
        assert arena.defined is not None
        if n > 8:
            return self._undefined(arena, at, 8) | self._undefined(arena, at + 8, 8)
        every = np.array((1 << 8 * n) - 1, f"u{n}")
        return arena.defined.views[n].take(at >> SHIFT[n]) != every

    def _undefined_bytes(self, arena: Arena, at: np.ndarray, n: int) -> np.ndarray:
        """Masks with a bit per byte of n-byte items, uint32."""
        assert arena.defined is not None
        places = np.add.outer(at, np.arange(n))
        return ((arena.defined.views[1].take(places) == 0) << np.arange(n)).sum(1, np.uint32)

    def loaded_registers(
        self, registers: tuple[int | None, ...], size: int, c: Any, ix: Any
    ) -> None:
        """The registers of a load (of ``size`` bytes each) are as defined as what was read."""
        for j, i in enumerate(registers):
            if i is None:
                continue
            self._set(i, ix, np.zeros(1, bool))
            for lanes, masks in self.fresh:
                self._set(i, lanes, (masks >> size * j & (1 << size) - 1).astype(np.uint8))
        self.fresh.clear()

    def loaded_matrix(
        self, indices: tuple[int, ...], c: Any, ix: Any, at: np.ndarray, trans: bool
    ) -> None:
        """ldmatrix: offsets [warps, count, 32], or [warps, 2, count, 32] with trans."""
        bad: Any = self._undefined(c.shared, at, 2 if trans else 4)
        bad = bad.any(1) if trans else bad
        for j, i in enumerate(indices):
            self._set(i, ix, bad[:, j].reshape(-1))

    def stored_bytes(self, arena: Arena, at: np.ndarray, n: int) -> None:
        """Bytes become defined, or undefined where the stored value was."""
        assert arena.defined is not None
        for part in range(0, n, 8):
            width = min(n, 8)
            arena.defined.views[width][at + part >> SHIFT[width]] = (1 << 8 * width) - 1
        if self.bad_store is not None and len(self.bad_store) == len(at):
            bits = self.bad_store[:, None] >> np.arange(n) & 1 != 0
            arena.defined.views[1][np.add.outer(at, np.arange(n))[bits]] = 0
        self.bad_store = None

    def storing(
        self, ins: Ins, c: Any, ix: Any, registers: tuple[int | None, ...], space: str
    ) -> None:
        """Before a store: an undefined value must not reach global memory."""
        self.bad_store = None
        lanes, size = lanes_of(c, ix), type_bytes(ins.type)
        masks = np.zeros(1, np.uint32)
        for j, i in enumerate(registers):
            if i in self.lanes:
                part = self.lanes[i][lanes].astype(np.uint32) & (1 << size) - 1
                masks = masks | part << size * j
        if not masks.any():
            return
        if space in ("shared", "local"):
            self.bad_store = masks
            return
        hint, what = "initialise the value, or do not store it", "an undefined value is stored"
        raise error(UninitialisedRead, ins, c, lanes[masks != 0], f"{what} to memory", hint)

    def require_shared(self, ins: Ins, lanes: np.ndarray, at: np.ndarray, n: int) -> None:
        """A bulk store must not carry undefined bytes to global memory."""
        bad = self._undefined(self.c.shared, at, n)
        if bad.any():
            hint, what = "write the whole source first", "shared memory that was never written"
            raise error(UninitialisedRead, ins, self.c, lanes[bad], f"a bulk store of {what}", hint)

    def atomic_bytes(
        self, ins: Ins, c: Any, lanes: np.ndarray, arena: Arena, at: np.ndarray, n: int
    ) -> None:
        """An atomic on bytes that nobody wrote works on garbage."""
        bad = self._undefined(arena, at, n)
        if bad.any() and "exch" not in ins.mods:
            hint = "initialise the location and put a barrier between"
            message = f"atomic on {arena.name} memory that was never written"
            raise error(UninitialisedRead, ins, c, lanes[bad], message, hint)
        self.bad_store = None
        self.stored_bytes(arena, at, n)

    # -- registers
    def written(self, index: int, ix: Any) -> None:
        """A waiting instruction has given the register a value."""
        self._set(index, ix, np.zeros(1, bool))

    def _set(self, index: int, ix: Any, bad: np.ndarray) -> None:
        if bad.dtype == np.bool_:
            bad = bad * np.uint8(ALL)
        row = self.lanes.get(index)
        if row is None:
            if not bad.any():
                return
            row = self.lanes[index] = np.zeros(self.c.L, np.uint8)
        row[... if ix is None else ix] = bad
        if not row.any():
            del self.lanes[index]

    def _any(self, operands: Any, lanes: np.ndarray) -> np.ndarray | None:
        rows = [
            self.lanes[r.index] for o in operands for r in registers_in(o) if r.index in self.lanes
        ]
        return np.logical_or.reduce([row[lanes] != 0 for row in rows]) if rows else None

    def _mask(self, operand: Any, lanes: np.ndarray) -> np.ndarray:
        row = self.lanes.get(operand.index) if isinstance(operand, Reg) else None
        return np.zeros(1, np.uint8) if row is None else row[lanes]

    def before(self, ins: Ins, ix: Any) -> None:
        """Uses that matter: conditions of jumps and memory accesses, and addresses."""
        lanes = lanes_of(self.c, ix)
        jumps = ins.op in ("bra", "brx", "exit", "ret")
        if ins.guard is not None:
            reg, negate = ins.guard
            if jumps or ins.op in _ADDRESSES:
                self._refuse(ins, self._any([reg], lanes), lanes, "decides what executes")
            lanes = lanes[self.c.rows[reg.index][lanes] ^ negate]
        if ins.op in _ADDRESSES:
            memory = [o for o in ins.ops if isinstance(o, Mem)]
            self._refuse(ins, self._any(memory, lanes), lanes, "is used as an address")
        elif ins.op == "brx":
            self._refuse(ins, self._any(ins.ops, lanes), lanes, "decides what executes")

    def _refuse(self, ins: Ins, bad: np.ndarray | None, lanes: np.ndarray, what: str) -> None:
        if bad is not None and bad.any():
            hint = "it comes from a register or from shared memory that was never written"
            raise error(
                UninitialisedRead, ins, self.c, lanes[bad], f"an undefined value {what}", hint
            )

    def after(self, ins: Ins, ix: Any) -> None:
        """Pass undefinedness from sources to the destination of an executed instruction."""
        if not has_dest(ins) or ins.op in ("ld", "ldu", "ldmatrix"):
            return
        lanes = lanes_of(self.c, ix)
        guard_bad = None
        if ins.guard is not None:
            reg, negate = ins.guard
            guard_bad = self._any([reg], lanes)
            chosen = self.c.rows[reg.index][lanes] ^ negate
            lanes = lanes[chosen]
            guard_bad = guard_bad[chosen] if guard_bad is not None else None
        written = registers_in(ins.ops[0])
        masks = moved(ins, lambda operand: self._mask(operand, lanes))
        if masks is None:
            masks = [self._result(ins, lanes) * np.uint8(ALL)] * len(written)
        for reg, bad in zip(written, masks, strict=True):
            whole = bad if guard_bad is None else bad | guard_bad * np.uint8(ALL)
            self._set(reg.index, lanes, whole)

    def _result(self, ins: Ins, lanes: np.ndarray) -> np.ndarray:
        none = np.zeros(1, bool)
        if ins.op in _DEFINED_RESULT:
            return none
        if ins.op == "shfl":
            row = self._any(ins.ops[1:2], self.c.all_lanes)
            if row is None:
                return none
            b, clamp = (reader(ins, o, 32)(self.c, lanes) for o in ins.ops[2:4])
            return row[shuffle_sources(_mode(ins), lanes, b, clamp)[0]]
        if ins.op == "selp":
            chosen = reader(ins, ins.ops[3], 1)(self.c, lanes)
            first, second = self._any(ins.ops[1:2], lanes), self._any(ins.ops[2:3], lanes)
            value = np.where(
                chosen, none if first is None else first, none if second is None else second
            )
            condition = self._any(ins.ops[3:4], lanes)
            return value if condition is None else value | condition
        found = self._any(ins.ops[1:], lanes)
        return none if found is None else found


def _mode(ins: Ins) -> str:
    return next(m for m in ins.mods if m in ("up", "down", "bfly", "idx"))
