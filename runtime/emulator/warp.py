"""Warp-wide instructions: shfl, vote, match, redux, elect, activemask, bar.warp.sync.

The scheduler has brought the lanes together; each instruction is done for all warps at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minitriton.runtime.emulator.checks import DivergentAligned
from minitriton.runtime.emulator.memory import error
from minitriton.runtime.emulator.module import Ins
from minitriton.runtime.emulator.operands import lanes_of, reader, writer
from minitriton.runtime.emulator.syntax import Immediate, Pair

Step = Callable[[Any, Any], None]
FULL_MASK = 0xFFFFFFFF
_LANE = np.arange(32, dtype=np.int64)


def mask_operand(ins: Ins) -> Any:
    """The membermask of a .sync instruction, None when it names the whole warp by nature."""
    if ins.op in ("shfl", "vote", "match", "redux", "elect"):
        return ins.ops[-1] if "sync" in ins.mods else None
    if ins.op == "bar":
        return ins.ops[0] if ins.ops else None
    return None


def member_check(ins: Ins) -> Step | None:
    """Refuse lanes that execute the instruction without being in its membermask."""
    operand = mask_operand(ins)
    if operand is None or (
        isinstance(operand, Immediate) and operand.value & FULL_MASK == FULL_MASK
    ):
        return None
    read = reader(ins, operand, 32)

    def check(c: Any, ix: Any) -> None:
        if "align" not in c.checks:
            return
        lanes = lanes_of(c, ix)
        inside = (read(c, ix) >> (lanes & 31).astype(np.uint32)) & np.uint32(1)
        if not inside.all():
            bad = lanes[np.broadcast_to(inside, lanes.shape) == 0]
            hint = "a lane that executes the instruction must be in its membermask"
            raise error(DivergentAligned, ins, c, bad, "lane outside the membermask", hint)

    return check


def _checked(ins: Ins, step: Step) -> Step:
    check = member_check(ins)
    if check is None:
        return step

    def run(c: Any, ix: Any) -> None:
        check(c, ix)
        step(c, ix)

    return run


def _active_bits(c: Any, ix: Any, flags: np.ndarray) -> np.ndarray:
    """Per warp of the chunk, the uint32 of ``flags`` over the lanes ``ix``."""
    bits = np.zeros(c.L, np.uint32)
    bits[... if ix is None else ix] = flags
    bits <<= c.lane_in_warp
    return np.bitwise_or.reduce(bits.reshape(-1, 32), axis=1)


# -- shuffles
def shfl(ins: Ins) -> Step:
    """shfl.sync and shfl: up, down, bfly, idx with clamp and segment mask."""
    mode = next(m for m in ins.mods if m in ("up", "down", "bfly", "idx"))
    dest = ins.ops[0]
    value, flag = (dest.first, dest.second) if isinstance(dest, Pair) else (dest, None)
    source = ins.ops[1]
    b, clamp = reader(ins, ins.ops[2], 32), reader(ins, ins.ops[3], 32)
    read = reader(ins, source, 32)
    write = writer(ins, value, 32)
    write_flag = writer(ins, flag, 1) if flag is not None else None
    fixed = isinstance(ins.ops[2], Immediate) and isinstance(ins.ops[3], Immediate)

    def plan(c: Any, ix: Any) -> tuple[np.ndarray, np.ndarray]:
        lanes = lanes_of(c, ix)
        return shuffle_sources(mode, lanes, b(c, ix), clamp(c, ix))

    def run(c: Any, ix: Any) -> None:
        if fixed and ix is None:
            found = c.plans.get(ins.pc)
            if found is None:
                found = c.plans[ins.pc] = plan(c, None)
        else:
            found = plan(c, ix)
        origin, valid = found
        row = read(c, None)
        got = row[origin] if len(row) > 1 else row
        write(c, ix, got)
        if write_flag is not None:
            write_flag(c, ix, valid)

    return _checked(ins, run)


def shuffle_sources(
    mode: str, lanes: np.ndarray, b: np.ndarray, c: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Absolute source lanes and whether they are in range (the ISA's pseudocode, vectorised)."""
    lane = lanes & 31
    amount, clamp = b.astype(np.int64) & 31, c.astype(np.int64) & 31
    segment = (c.astype(np.int64) >> 8) & 31
    highest = (lane & segment) | (clamp & ~segment)
    lowest = lane & segment
    if mode == "up":
        j = lane - amount
        valid = j >= highest
    elif mode == "down":
        j = lane + amount
        valid = j <= highest
    elif mode == "bfly":
        j = lane ^ amount
        valid = j <= highest
    else:
        j = lowest | (amount & ~segment)
        valid = j <= highest
    return (lanes & ~31) + np.where(valid, j, lane), valid


# -- votes
def vote(ins: Ins) -> Step:
    """vote.sync.{all,any,uni,ballot}."""
    mode = next(m for m in ins.mods if m in ("all", "any", "uni", "ballot"))
    read = reader(ins, ins.ops[1], 1)
    write = writer(ins, ins.ops[0], 32 if mode == "ballot" else 1)

    def run(c: Any, ix: Any) -> None:
        flags = read(c, ix)
        ballot = _active_bits(c, ix, flags)
        warp = lanes_of(c, ix) >> 5
        if mode == "ballot":
            result = ballot
        else:
            present = _active_bits(c, ix, np.ones(1, bool))
            every, some = ballot == present, ballot != 0
            result = {"all": every, "any": some, "uni": every | ~some}[mode]
        write(c, ix, result[warp])

    return _checked(ins, run)


def activemask(ins: Ins) -> Step:
    write = writer(ins, ins.ops[0], 32)

    def run(c: Any, ix: Any) -> None:
        write(c, ix, _active_bits(c, ix, np.ones(1, bool))[lanes_of(c, ix) >> 5])

    return run


def elect(ins: Ins) -> Step:
    """elect.sync: the lowest lane present is the leader."""
    dest = ins.ops[0]
    leader, flag = (dest.first, dest.second) if isinstance(dest, Pair) else (None, dest)
    write_leader = writer(ins, leader, 32) if leader is not None else None
    write_flag = writer(ins, flag, 1)

    def run(c: Any, ix: Any) -> None:
        lanes = lanes_of(c, ix)
        first = np.full(c.L >> 5, 32, np.int64)
        np.minimum.at(first, lanes >> 5, lanes & 31)
        mine = first[lanes >> 5]
        if write_leader is not None:
            write_leader(c, ix, mine)
        write_flag(c, ix, mine == (lanes & 31))

    return _checked(ins, run)


def match(ins: Ins) -> Step:
    """match.any.sync and match.all.sync on 32 or 64 bits."""
    bits = int(ins.type[1:])
    every = "all" in ins.mods
    dest = ins.ops[0]
    value, flag = (dest.first, dest.second) if isinstance(dest, Pair) else (dest, None)
    read, write = reader(ins, ins.ops[1], bits), writer(ins, value, 32)
    write_flag = writer(ins, flag, 1) if flag is not None else None

    def run(c: Any, ix: Any) -> None:
        lanes = lanes_of(c, ix)
        data = np.zeros(c.L, np.uint64)
        data[lanes] = read(c, ix)
        here = np.zeros(c.L, bool)
        here[lanes] = True
        table, here = data.reshape(-1, 32), here.reshape(-1, 32)
        same = (table[:, :, None] == table[:, None, :]) & here[:, None, :]
        masks = (same.astype(np.uint32) << _LANE.astype(np.uint32)).sum(2, dtype=np.uint32)
        masks = masks.reshape(-1)[lanes]
        if every:
            present = _active_bits(c, ix, np.ones(1, bool))[lanes >> 5]
            agreed = masks == present
            masks = np.where(agreed, masks, np.uint32(0))
            if write_flag is not None:
                write_flag(c, ix, agreed)
        write(c, ix, masks)

    return _checked(ins, run)


#: Per operation: the ufunc, its neutral element unsigned and signed.
_REDUCTIONS = {
    "add": (np.add, 0, 0), "and": (np.bitwise_and, FULL_MASK, -1), "or": (np.bitwise_or, 0, 0),
    "xor": (np.bitwise_xor, 0, 0), "min": (np.minimum, FULL_MASK, 0x7FFFFFFF),
    "max": (np.maximum, 0, -0x80000000),
}  # fmt: skip


def redux(ins: Ins) -> Step:
    """redux.sync on 32-bit integers."""
    op = next(m for m in ins.mods if m in _REDUCTIONS)
    if ins.type not in ("u32", "s32", "b32"):
        raise ins.unsupported("floating-point redux")
    function, unsigned_start, signed_start = _REDUCTIONS[op]
    signed = ins.type == "s32"
    dtype = np.dtype(np.int32 if signed else np.uint32)
    start = signed_start if signed else unsigned_start
    read, write = reader(ins, ins.ops[1], 32), writer(ins, ins.ops[0], 32)

    def run(c: Any, ix: Any) -> None:
        data = np.full(c.L, start, dtype)
        data[... if ix is None else ix] = read(c, ix).view(dtype)
        result = function.reduce(data.reshape(-1, 32), axis=1, dtype=dtype).view(np.uint32)
        write(c, ix, result[lanes_of(c, ix) >> 5])

    return _checked(ins, run)


def warp_barrier(ins: Ins) -> Step:
    """bar.warp.sync: the scheduler has already gathered the lanes."""

    def run(c: Any, ix: Any) -> None:
        if c.race is not None:
            c.race.warp_sync(lanes_of(c, ix))

    return _checked(ins, run)


RULES: dict[str, Callable[[Ins], Step]] = {
    "shfl": shfl,
    "vote": vote,
    "match": match,
    "redux": redux,
    "elect": elect,
    "activemask": activemask,
}
