"""wgmma: matrix products of warpgroups on shared memory that run beside the threads.

Each warp computes its own 16 rows of a 64-row instruction. Sums are exact, of fp8 products too, of
which the hardware keeps some 14 bits, and rounded once to the type of the accumulator. A product
reads its operands and changes its accumulators when it lands: at issue (early) or when its warp
waits for its group (late), as the landing policy says; for the race check its reads last until that
wait either way. So a missing wait, commit or barrier shows in the result or is reported. A group is
the whole warpgroup's: none of its warps passes the wait for it before all have committed it, so
that one of them may then answer for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from minitriton.runtime.emulator import minifloat
from minitriton.runtime.emulator.checks import RegisterRace, UninitialisedRead
from minitriton.runtime.emulator.formats import F32, F64, FORMATS, canonical_f32, narrow, to_f32
from minitriton.runtime.emulator.fragments import a_positions
from minitriton.runtime.emulator.matrix import _stack, _whole_warps
from minitriton.runtime.emulator.memory import error
from minitriton.runtime.emulator.module import Ins
from minitriton.runtime.emulator.operands import reader, writer
from minitriton.runtime.emulator.syntax import Immediate, Vector
from minitriton.runtime.emulator.tensor import TF32_MASK, operand_values

Step = Callable[[Any, Any], None]
_ROW_BYTES = 32  # of each row or column of an operand that one instruction reads
_CHUNK = 16  # bytes that lie together whatever the swizzle
_GROUP = 4  # warps of a warpgroup
_SPANS = np.array([0, 128, 64, 32])  # by the descriptor's swizzle code


@dataclass(slots=True)
class Product:
    """One wgmma of some warps; arrays have a row per warp."""

    ins: Ins
    land: Callable[[Any, Product], None]
    warps: np.ndarray
    group: np.ndarray
    left: np.ndarray | None  # arena offsets of A's elements; None: A is in registers
    right: np.ndarray  # arena offsets of B's elements
    keep: np.ndarray  # by lane, whether the product is added to what was there
    landed: bool
    size: int  # bytes of an element

    def subset(self, pick: np.ndarray) -> Product:
        left = None if self.left is None else self.left[pick]
        return Product(
            self.ins, self.land, self.warps[pick], self.group[pick], left, self.right[pick],
            self.keep[pick], self.landed, self.size,
        )  # fmt: skip

    def chunks(self) -> np.ndarray:
        """Arena offsets of the 16-byte chunks that each warp reads, [warps, n]."""
        parts = [self.right] if self.left is None else [self.left, self.right]
        return np.concatenate(
            [part[..., :: _CHUNK // self.size].reshape(len(self.warps), -1) for part in parts],
            axis=1,
        ) & ~np.int64(_CHUNK - 1)


def _lanes(warps: np.ndarray) -> np.ndarray:
    return (warps[:, None] * 32 + np.arange(32)).reshape(-1)


class ProductEngine:
    """The products of a chunk that no warp has waited for, in order of issue."""

    def __init__(self, chunk: Any) -> None:
        self.c = chunk
        self.pending: list[Product] = []
        self.committed = np.zeros(chunk.L >> 5, np.int64)
        self.awaited = np.zeros(chunk.L >> 5, np.int64)  # groups that parked warps wait for
        warps = chunk.padded >> 5
        per_cta = -(-warps // _GROUP)
        number = np.arange(chunk.L >> 5)
        self.group = number // warps * per_cta + number % warps // _GROUP
        self.groups = chunk.ctas * per_cta

    def issue(self, product: Product) -> None:
        c = self.c
        if c.race is not None:
            c.race.tensor_issue(product.ins, product.warps, product.chunks(), product.group)
        policy = c.landing
        if policy == "random":
            policy = "early" if c.rng.random() < 0.5 else "late"
        waiting = any(not p.landed for p in self.pending)  # products land in order
        if policy == "early" and not waiting:
            self._land(product)
        if not product.landed:
            self.pending.append(product)

    def commit(self, warps: np.ndarray) -> None:
        self.committed[warps] += 1
        self.recheck()

    def _complete(self) -> np.ndarray:
        """Per warpgroup, how many groups all its live warps have committed."""
        fewest = np.full(self.groups, np.iinfo(np.int64).max)
        alive = self.c.live.reshape(-1, 32).any(1)
        np.minimum.at(fewest, self.group[alive], self.committed[alive])
        return fewest

    def wait(self, ins: Ins, warps: np.ndarray, keep: int) -> bool:
        """End, for each warp, all but its ``keep`` newest groups; False if some are parked."""
        limit = self.committed[warps] - keep
        ready = self._complete()[self.group[warps]] >= limit
        self._end(warps[ready], limit[ready])
        if ready.all():
            return True
        c, early = self.c, warps[~ready]
        c.split()
        c.key[_lanes(warps[ready])] = ins.pc + 1
        self.awaited[early] = limit[~ready]
        c.park(_lanes(early), ins.pc, self)
        return False

    def recheck(self) -> None:
        """Free the warps whose groups have been committed by the rest of their warpgroup."""
        parked = np.flatnonzero(self.awaited)
        if not len(parked):
            return
        free = parked[self._complete()[self.group[parked]] >= self.awaited[parked]]
        self._end(free, self.awaited[free])
        self.awaited[free] = 0
        self.c.unpark(_lanes(free))

    def describe(self, lane: int) -> str:
        """What a parked lane is waiting for."""
        warp = lane >> 5
        done = int(self._complete()[self.group[warp]])
        return f"wgmma group {self.awaited[warp]}: its warpgroup has committed only {done}"

    def _end(self, warps: np.ndarray, groups: np.ndarray) -> None:
        """The first ``groups`` groups of the warps' warpgroups are over."""
        if self.c.race is not None and len(warps):
            self.c.race.tensor_done(warps, groups)
        if not self.pending:
            return
        ended = np.full(self.groups, -1, np.int64)
        np.maximum.at(ended, self.group[warps], groups)
        limit = ended[self.group]
        kept = []
        for product in self.pending:
            due = product.group < limit[product.warps]
            if not due.any():
                kept.append(product)
                continue
            ended = product if due.all() else product.subset(due)
            self._land(ended)
            if ended is not product:
                kept.append(product.subset(~due))
        self.pending = kept

    def _land(self, product: Product) -> None:
        product.land(self.c, product)
        product.landed = True
        self.c.progress += 1


def _offsets(
    ins: Ins, c: Any, warps: np.ndarray, descriptor: np.ndarray, rows: np.ndarray, size: int,
    mn_major: bool,
) -> np.ndarray:  # fmt: skip
    """Arena offsets of elements of `size` bytes: [warps, len(rows), depth], or [warps, depth,
    len(rows)] if mn_major.

    rows: indices along M or N. The fastest dimension in memory comes last.
    """
    fields = [(descriptor >> np.uint64(s) & np.uint64(0x3FFF)).astype(np.int64) << 4
              for s in (0, 16, 32)]  # fmt: skip
    start, leading, stride = (field[:, None, None] for field in fields)
    span = _SPANS[(descriptor >> np.uint64(62)).astype(np.int64)]
    odd = (descriptor >> np.uint64(46) & np.uint64(0xFFFF)).any()
    if odd or not span.all():
        raise ins.unsupported("only swizzled descriptors without a base offset")
    span = span[:, None, None]
    k = np.arange(_ROW_BYTES // size)
    if mn_major:
        line = span // size
        outer, inner = k[:, None], rows[None, :]
        at = start + inner // line * leading + inner % line * size
        at = at + outer // 8 * stride + outer % 8 * span
    else:
        outer, inner = rows[:, None], k[None, :]
        at = start + outer // 8 * stride + outer % 8 * span + inner * size
    at = at ^ (at >> 7 & span // 16 - 1) << 4
    lanes = np.broadcast_to((warps * 32)[:, None, None], at.shape)
    return c.shared.index(ins, c, lanes.reshape(-1), at.reshape(-1), size).reshape(at.shape)


def _uniform(ins: Ins, value: np.ndarray, warps: int) -> np.ndarray:
    """A warp-uniform operand by warp."""
    rows = np.broadcast_to(value, (warps * 32,)).reshape(warps, 32)
    if (rows != rows[:, :1]).any():
        raise ins.unsupported("a descriptor differs between the lanes of a warp")
    return np.ascontiguousarray(rows[:, 0])


def _product(ins: Ins) -> Step:
    shape, d_type, a_type, b_type = ins.mods[-4:]
    columns, depth = map(int, shape.removeprefix("m64n").split("k"))
    size = _ROW_BYTES // depth
    integers = d_type == "s32"
    if "satfinite" in ins.mods or not _is_known(size, d_type, a_type, b_type):
        what = "only f16, bf16, tf32 or fp8 summed in f32, f16 or fp8 in f16, or bytes in s32"
        raise ins.unsupported(what)
    d, a, b, flag, *rest = ins.ops
    from_registers = isinstance(a, Vector)
    numbers = [o.value for o in rest if isinstance(o, Immediate)]
    signs = [] if integers else [1, 1]
    orders = 0 if size != 2 else 1 if from_registers else 2  # others are K-major
    if numbers[: len(signs)] != signs or len(numbers) != len(signs) + orders:
        raise ins.unsupported("operand signs")
    if len(d.items) != columns // (4 if d_type == "f16" else 2) or (
        integers and columns % 16 and columns not in (8, 24)
    ):
        raise ins.unsupported("operand sizes")
    a_mn, b_mn = (*(0,) * (2 - orders), *numbers[len(signs) :])
    read_a = [reader(ins, r, 32) for r in a.items] if from_registers else [reader(ins, a, 64)]
    read_b, read_flag = reader(ins, b, 64), reader(ins, flag, 1)
    sums = [(reader(ins, r, 32), writer(ins, r, 32)) for r in d.items]
    fragment = a_positions(16, depth, 4 // size)
    row, column = _accumulator(columns)
    add = {"f32": _add_f32, "f16": _add_f16, "s32": _add_s32}[d_type]

    def land(c: Any, product: Product) -> None:
        lanes = _lanes(product.warps)
        if product.left is None:
            x = operand_values(_stack(c, lanes, read_a, len(product.warps)), a_type)[:, fragment]
        else:
            x = _values(c, product.left, a_type, bool(a_mn))
        y = _values(c, product.right, b_type, not b_mn)
        total = np.matmul(x, y)[:, row, column]  # [warps, elements of a thread, 32]
        parts = np.split(total, len(sums), axis=1)  # by register
        for part, (read, write) in zip(parts, sums, strict=True):
            old = np.where(product.keep, read(c, lanes).reshape(-1, 32), np.uint32(0))
            write(c, lanes, np.ascontiguousarray(add(old, part)).reshape(-1))

    def run(c: Any, ix: Any) -> None:
        warps = _whole_warps(ins, c, ix)
        local = warps % (c.padded >> 5) % 4
        left = None
        if not from_registers:
            descriptor = _uniform(ins, read_a[0](c, ix), len(warps))
            left = np.empty((len(warps), 16, depth), np.int64)
            for quarter in np.unique(local):
                pick = local == quarter
                rows = np.arange(16 * quarter, 16 * quarter + 16)
                left[pick] = _offsets(ins, c, warps[pick], descriptor[pick], rows, size, bool(a_mn))
        descriptor = _uniform(ins, read_b(c, ix), len(warps))
        right = _offsets(ins, c, warps, descriptor, np.arange(columns), size, bool(b_mn))
        keep = np.broadcast_to(read_flag(c, ix), (32 * len(warps),)).reshape(-1, 32).copy()
        engine: ProductEngine = c.engines["wgmma"]
        group = engine.committed[warps]
        product = Product(ins, land, warps, group, left, right, keep, False, size)
        if ins.pc in c.launch.unfenced:
            _refuse_unfenced(ins, c, warps)
        _check_defined(ins, c, product)
        engine.issue(product)
        c.flops[f"mma_{a_type}"] += 2 * 16 * columns * depth * len(warps)

    return run


def _is_known(size: int, d_type: str, a_type: str, b_type: str) -> bool:
    types = {a_type, b_type}
    if d_type == "s32":
        return size == 1 and types <= {"s8", "u8"}
    if d_type not in ("f32", "f16"):
        return False
    if size == 1:
        return types <= set(minifloat.NAMES)
    halves = [{"f16"}, {"bf16"}] if d_type == "f32" else [{"f16"}]
    return types in (halves if size == 2 else [{"tf32"}] if (size, d_type) == (4, "f32") else [])


# What becomes of the bits of a register, [warps, 32], to which sums [warps, elements, 32] are added


def _add_f32(old: np.ndarray, sums: np.ndarray) -> np.ndarray:
    return canonical_f32((old.view(F32).astype(F64) + sums[:, 0]).astype(F32))


def _add_f16(old: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """Two halves, the lower one first."""
    low, high = (
        narrow(to_f32(bits.astype(np.uint16), "f16").astype(F64) + sums[:, half], FORMATS["f16"])
        for half, bits in enumerate((old & 0xFFFF, old >> 16))
    )
    return low.astype(np.uint32) | high.astype(np.uint32) << 16


def _add_s32(old: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """Whole numbers below 2**53, as without .satfinite."""
    after = old.view(np.int32).astype(F64) + sums[:, 0]
    return (after.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32)


def _accumulator(columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column [elements, 32] of what the accumulator registers of a warp hold."""
    element, lane = np.arange(columns // 2)[:, None], np.arange(32)[None, :]
    row = lane // 4 + 8 * (element // 2 % 2)
    column = 8 * (element // 4) + 2 * (lane % 4) + element % 2
    return row, column


def _values(c: Any, at: np.ndarray, ptx_type: str, transposed: bool) -> np.ndarray:
    """Elements at arena offsets as float64 matrices, turned where the memory order asks for it."""
    if ptx_type in minifloat.NAMES:
        values = minifloat.decode(c.shared.views[1].take(at), ptx_type).astype(F64)
    elif ptx_type in ("s8", "u8"):
        kind = np.int8 if ptx_type == "s8" else np.uint8
        values = c.shared.views[1].take(at).view(kind).astype(F64)
    elif ptx_type == "tf32":  # the low 13 bits are ignored
        values = (c.shared.views[4].take(at >> 2) & TF32_MASK).view(F32).astype(F64)
    else:
        values = to_f32(c.shared.views[2].take(at >> 1), ptx_type).astype(F64)
    return values.transpose(0, 2, 1) if transposed else values


def _check_defined(ins: Ins, c: Any, product: Product) -> None:
    if c.uninit is None:
        return
    defined = c.shared.defined.views[8]
    chunks = product.chunks() >> 3
    bad = (~defined.take(chunks) | ~defined.take(chunks + 1)).any(1)
    if bad.any():
        hint = "wait for the copies, or copy the whole tile"
        what = "wgmma reads shared memory that was never written"
        raise error(UninitialisedRead, ins, c, product.warps[bad] * 32, what, hint)


def _refuse_unfenced(ins: Ins, c: Any, warps: np.ndarray) -> None:
    rival = c.launch.unfenced[ins.pc]
    what = "no wgmma.fence comes before the product"
    if rival is not None:
        what = f"no wgmma.fence orders the product after PTX line {rival.line} ({rival.op})"
    hint = "wgmma.fence must follow the last access to accumulators and to A in registers"
    raise error(RegisterRace, ins, c, warps * 32, f"{what}, which uses its registers", hint)


def wgmma(ins: Ins) -> Step:
    """wgmma.mma_async, commit_group and fence."""
    if "mma_async" in ins.mods:
        return _product(ins)
    if "commit_group" in ins.mods:
        return lambda c, ix: c.engines["wgmma"].commit(_whole_warps(ins, c, ix))
    return lambda c, ix: None


def wait_group(ins: Ins) -> Callable[[Any, Any], bool]:
    """wgmma.wait_group; see `decode.Blocking`."""
    keep = ins.ops[0].value
    return lambda c, ix: c.engines["wgmma"].wait(ins, _whole_warps(ins, c, ix), keep)


RULES: dict[str, Callable[[Ins], Step]] = {"wgmma": wgmma}
