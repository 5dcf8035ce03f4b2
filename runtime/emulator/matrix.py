"""Tensor-core instructions of whole warps: mma.sync, ldmatrix, stmatrix, movmatrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minitriton.runtime.emulator import tensor
from minitriton.runtime.emulator.access import addresser, memory_operand
from minitriton.runtime.emulator.checks import DivergentAligned
from minitriton.runtime.emulator.memory import error
from minitriton.runtime.emulator.module import Ins, Reg
from minitriton.runtime.emulator.operands import lanes_of, reader, writer
from minitriton.runtime.emulator.syntax import Vector

Step = Callable[[Any, Any], None]
_LANE = np.arange(32, dtype=np.int64)


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
    order = [m for m in ins.mods if m in ("row", "col")]
    if len(order) != 2:
        raise ins.unsupported("mma needs two layouts")
    layouts = (order[0], order[1])
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
    first = np.asarray(reads[0](c, ix))
    rows = np.empty((len(reads), warps * 32), first.dtype)
    rows[0] = first
    for row, read in zip(rows[1:], reads[1:], strict=True):
        row[...] = read(c, ix)
    return rows.reshape(len(reads), warps, 32)


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
    address = addresser(ins, memory_operand(ins, 1), "shared")
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
    address = addresser(ins, memory_operand(ins, 0), "shared")
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
    "mma": mma,
    "ldmatrix": ldmatrix,
    "stmatrix": stmatrix,
    "movmatrix": movmatrix,
}
