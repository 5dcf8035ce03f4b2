"""Warp-wide instructions: shfl, vote, match, redux, elect, activemask, bar.warp.sync, and the
tensor-core moves and products of whole warps.

The scheduler has brought the lanes together; here each instruction is done for all warps at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minitriton.runtime.emulator import tensor
from minitriton.runtime.emulator.access import memory_operand
from minitriton.runtime.emulator.access import addresser as make_addresser
from minitriton.runtime.emulator.checks import DivergentAligned
from minitriton.runtime.emulator.memory import error
from minitriton.runtime.emulator.module import Ins, Reg
from minitriton.runtime.emulator.operands import lanes_of, reader, writer
from minitriton.runtime.emulator.syntax import Immediate, Pair, Vector

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


# -- matrices
def _whole_warps(ins: Ins, c: Any, ix: Any) -> np.ndarray:
    """Warp numbers of a fragment that must consist of whole warps."""
    lanes = lanes_of(c, ix)
    if len(lanes) % 32 or (lanes.reshape(-1, 32) & 31 != _LANE).any():
        hint = "move the instruction out of divergent code, or round the block up to whole warps"
        message = "a matrix instruction needs all 32 lanes of the warp"
        raise error(DivergentAligned, ins, c, lanes, message, hint)
    return lanes[::32] >> 5


def _registers(ins: Ins, operand: Any) -> list[Any]:
    return list(operand.items) if isinstance(operand, Vector) else [operand]


def mma(ins: Ins) -> Step:
    """mma.sync.aligned of the shapes that tensor.mma_sync knows."""
    shape = next((m for m in ins.mods if m[0] == "m" and m[1:2].isdigit()), "")
    layouts = tuple(m for m in ins.mods if m in ("row", "col"))
    types = ins.mods[-4:]
    if any(m in ins.mods for m in ("sp", "sp::ordered_metadata", "xor", "and", "block_scale")):
        raise ins.unsupported()
    d_type, a_type, b_type, c_type = types
    try:
        product = tensor.mma_sync(
            shape, a_type, b_type, c_type, d_type, layouts, "satfinite" in ins.mods
        )
    except (ValueError, KeyError) as problem:
        raise ins.unsupported(str(problem)) from None
    bits = 64 if a_type == "f64" else 32
    reads = [[reader(ins, r, bits) for r in _registers(ins, o)] for o in ins.ops[1:4]]
    writes = [writer(ins, r, bits) for r in _registers(ins, ins.ops[0])]
    m, n, k = (int(t) for t in shape[1:].replace("n", " ").replace("k", " ").split())
    flops, kind = 2 * m * n * k, f"mma_{a_type}"

    def run(c: Any, ix: Any) -> None:
        warps = len(_whole_warps(ins, c, ix))
        a, b, acc = (_stack(c, ix, group, warps) for group in reads)
        result = product(a, b, acc)
        for j, write in enumerate(writes):
            write(c, ix, result[j].reshape(-1))
        c.flops[kind] += flops * warps

    return run


def _stack(c: Any, ix: Any, reads: list[Any], warps: int) -> np.ndarray:
    rows = [np.broadcast_to(read(c, ix), (warps * 32,)) for read in reads]
    return np.stack(rows).reshape(len(rows), warps, 32)


def _matrix_form(ins: Ins) -> tuple[int, bool]:
    if ins.type != "b16" or "m8n8" not in ins.mods:
        raise ins.unsupported("only .m8n8 .b16 matrices")
    count = next((int(m[1:]) for m in ins.mods if m in ("x1", "x2", "x4")), 1)
    return count, "trans" in ins.mods


def _row_addresses(c: Any, ix: Any, ins: Ins, a: np.ndarray, count: int) -> np.ndarray:
    """Arena offsets [warps, 8*count] of the rows; only the lanes that give rows are checked."""
    warps = len(_whole_warps(ins, c, ix))
    a = np.broadcast_to(a, (warps * 32,))
    used = np.flatnonzero((c.lane_in_warp_of(ix)) < 8 * count)
    lanes = lanes_of(c, ix)[used]
    return c.shared.index(ins, c, lanes, a[used], 16).reshape(warps, 8 * count)


def ldmatrix(ins: Ins) -> Step:
    count, trans = _matrix_form(ins)
    address = make_addresser(ins, memory_operand(ins, 1), "shared")
    regs = _registers(ins, ins.ops[0])
    writes = [writer(ins, r, 32) for r in regs]
    indices = tuple(r.index for r in regs if isinstance(r, Reg))
    lane, offset = tensor.ldmatrix_gather(count, trans)

    def run(c: Any, ix: Any) -> None:
        rows = _row_addresses(c, ix, ins, address(c, ix), count)
        lanes = lanes_of(c, ix)
        if c.race is not None or c.uninit is not None:
            used = lanes[(lanes & 31) < 8 * count]
            if c.race is not None:
                c.race.read(ins, c, used, rows.reshape(-1), 16)
        if trans:
            at = rows[:, lane] + offset
            half = c.shared.views[2].take(at >> 1).astype(np.uint32)
            got = half[:, 0] | (half[:, 1] << np.uint32(16))
        else:
            at = rows[:, lane] + offset
            got = c.shared.views[4].take(at >> 2)
        for j, write in enumerate(writes):
            write(c, ix, got[:, j].reshape(-1))
        c.bytes["load_shared"] += len(rows) * count * 128
        if c.uninit is not None:
            c.uninit.loaded_matrix(indices, c, ix, at, trans)

    return run


def stmatrix(ins: Ins) -> Step:
    count, trans = _matrix_form(ins)
    address = make_addresser(ins, memory_operand(ins, 0), "shared")
    reads = [reader(ins, r, 32) for r in _registers(ins, ins.ops[1])]
    lane, offset = tensor.stmatrix_scatter(count, trans)

    def run(c: Any, ix: Any) -> None:
        rows = _row_addresses(c, ix, ins, address(c, ix), count)
        warps = len(rows)
        data = _stack(c, ix, reads, warps).transpose(1, 0, 2)
        lanes = lanes_of(c, ix)
        used = lanes[(lanes & 31) < 8 * count]
        at = rows[:, lane] + offset
        if trans:
            halves = np.stack([data & np.uint32(0xFFFF), data >> np.uint32(16)], axis=1)
            items, width = halves.astype(np.uint16), 2
        else:
            items, width = data, 4
        if c.race is not None:
            owners = np.broadcast_to((lanes[::32]).reshape(-1, *(1,) * (at.ndim - 1)), at.shape)
            c.race.write(ins, c, owners.reshape(-1), at.reshape(-1), width, items.reshape(-1))
        c.shared.views[width][at >> (width >> 1)] = items
        if c.uninit is not None:
            c.uninit.stored_bytes(c.shared, rows.reshape(-1), 8)
            c.uninit.stored_bytes(c.shared, rows.reshape(-1) + 8, 8)
        c.progress += len(used)
        c.bytes["store_shared"] += warps * count * 128

    return run


def movmatrix(ins: Ins) -> Step:
    read, write = reader(ins, ins.ops[1], 32), writer(ins, ins.ops[0], 32)

    def run(c: Any, ix: Any) -> None:
        warps = len(_whole_warps(ins, c, ix))
        rows = np.broadcast_to(read(c, ix), (warps * 32,)).reshape(warps, 32)
        write(c, ix, tensor.movmatrix(rows).reshape(-1))

    return run


RULES: dict[str, Callable[[Ins], Step]] = {
    "shfl": shfl,
    "vote": vote,
    "match": match,
    "redux": redux,
    "elect": elect,
    "activemask": activemask,
    "mma": mma,
    "ldmatrix": ldmatrix,
    "stmatrix": stmatrix,
    "movmatrix": movmatrix,
}
