"""Loads, stores and address-space instructions: ld, ldu, st, cvta, isspacep, prefetch.

`fetcher` and `putter` give the raw move for a space; `load` and `store` add register handling.
A generic access is split by address window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minitriton.runtime.emulator.checks import OutOfBounds
from minitriton.runtime.emulator.memory import CARRIER, SHIFT, error
from minitriton.runtime.emulator.module import (
    LOCAL_WINDOW,
    PARAM_WINDOW,
    SHARED_WINDOW,
    WINDOW_SHIFT,
    Ins,
    Mem,
    Reg,
    Sink,
    type_bytes,
)
from minitriton.runtime.emulator.operands import UNSIGNED, lanes_of, reader, writer
from minitriton.runtime.emulator.syntax import Immediate, Vector

Step = Callable[[Any, Any], None]
Fetch = Callable[[Any, Any, np.ndarray], np.ndarray]
Put = Callable[[Any, Any, np.ndarray, np.ndarray], None]

SPACES = ("global", "shared", "local", "param", "const")
_OFFSET_MASK = np.uint64((1 << WINDOW_SHIFT) - 1)
WINDOWS = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAM_WINDOW}


def space_of(ins: Ins) -> str:
    """The state space named by an instruction, "generic" if none."""
    for mod in ins.mods:
        name = mod.split("::")[0]
        if name in SPACES:
            if mod == "shared::cluster":
                return "shared"
            return "global" if name == "const" else name
    return "generic"


def memory_operand(ins: Ins, position: int) -> Mem:
    operand = ins.ops[position]
    if not isinstance(operand, Mem):
        raise ins.unsupported("a bracketed address is required")
    return operand


def addresser(ins: Ins, mem: Mem, space: str) -> Callable[[Any, Any], np.ndarray]:
    """Addresses of ``mem``: uint64 for global and generic, int64 offsets for the arenas."""
    offset, wide = mem.offset, space in ("global", "generic")
    if mem.base is None or isinstance(mem.base, Immediate):
        value = offset + (mem.base.value if mem.base is not None else 0)
        if space == "generic" and mem.origin in ("shared", "local"):
            value += WINDOWS[mem.origin]
        constant = np.array([value & ((1 << 64) - 1)], np.uint64)
        constant = constant if wide else constant.view(np.int64)
        return lambda c, ix: constant
    if not isinstance(mem.base, Reg) or mem.base.bits not in (32, 64):
        raise ins.unsupported("an address must be a 32- or 64-bit register")
    i, bits = mem.base.index, mem.base.bits
    add = np.array([offset & ((1 << bits) - 1)], UNSIGNED[bits])
    target = np.dtype(np.uint64) if wide else np.dtype(np.int64)

    def compute(c: Any, ix: Any) -> np.ndarray:
        row = c.rows[i] if ix is None else c.rows[i][ix]
        row = row + add if offset else row
        return row.view(target) if bits == 64 else row.astype(target)

    return compute


def shared_addresser(ins: Ins, mem: Mem) -> Callable[[Any, Any], np.ndarray]:
    """Offsets in shared memory of an operand that must lie there, by a generic address too."""
    if space_of(ins) != "generic":
        return addresser(ins, mem, "shared")
    generic = addresser(ins, mem, "generic")

    def compute(c: Any, ix: Any) -> np.ndarray:
        a = generic(c, ix)
        outside = a >> np.uint64(WINDOW_SHIFT) != SHARED_WINDOW >> WINDOW_SHIFT
        if outside.any():
            message = f"generic address {int(a[outside][0]):#x} is not in shared memory"
            lanes = np.broadcast_to(lanes_of(c, ix), np.broadcast_shapes(a.shape, (c.count(ix),)))
            bad = np.broadcast_to(outside, lanes.shape)
            raise error(OutOfBounds, ins, c, lanes[bad], message)
        return (a & _OFFSET_MASK).view(np.int64)

    return compute


def fetcher(ins: Ins, space: str, n: int) -> Fetch:
    """Move n-byte items from ``space``: callable(chunk, ix, addresses) -> items [lanes]."""
    if space == "global":
        return lambda c, ix, a: c.globals.load(ins, c, ix, a, n)
    if space in ("shared", "local"):
        return _arena_fetch(ins, space, n)
    if space == "param":
        return lambda c, ix, a: _param_fetch(ins, c, ix, a, n)
    return _generic_fetch(ins, n)


def _arena_fetch(ins: Ins, space: str, n: int) -> Fetch:
    shift = SHIFT[n]

    def fetch(c: Any, ix: Any, a: np.ndarray) -> np.ndarray:
        arena = c.shared if space == "shared" else c.local
        at = arena.index(ins, c, ix, a, n)
        if space == "shared" and c.race is not None:
            c.race.read(ins, c, ix, at, n)
        if c.uninit is not None:
            c.uninit.loaded_bytes(arena, at, n, lanes_of(c, ix))
        return arena.views[n].take(at >> shift)

    return fetch


def _param_fetch(ins: Ins, c: Any, ix: Any, a: np.ndarray, n: int) -> np.ndarray:
    size = len(c.params)
    if a.min() < 0 or int(a.max()) + n > size:
        message = f"{n}-byte parameter read at offset {int(a.max())} of {size} bytes"
        raise error(OutOfBounds, ins, c, lanes_of(c, ix), message)
    return c.params[a[:, None] + np.arange(n)].view(CARRIER[n])[:, 0]


def _split_windows(a: np.ndarray) -> list[tuple[int, Any]]:
    window = a >> np.uint64(WINDOW_SHIFT)
    low, high = int(window.min()), int(window.max())
    if low == high:
        return [(low, None)]
    return [(int(w), np.flatnonzero(window == w)) for w in np.unique(window)]


_WINDOW_SPACES = {0: "global", 1: "shared", 2: "local", 3: "param"}


def _local_address(window: int, a: np.ndarray) -> np.ndarray:
    return a if window == 0 else (a & _OFFSET_MASK).view(np.int64)


def _generic_fetch(ins: Ins, n: int) -> Fetch:
    moves = {w: fetcher(ins, s, n) for w, s in _WINDOW_SPACES.items()}

    def fetch(c: Any, ix: Any, a: np.ndarray) -> np.ndarray:
        parts = _split_windows(a)
        if len(parts) == 1:
            window = parts[0][0]
            return moves.get(window, moves[0])(c, ix, _local_address(window, a))
        out = np.empty(len(a), CARRIER[n])
        lanes = lanes_of(c, ix)
        for window, pick in parts:
            a_part = _local_address(window, a[pick])
            out[pick] = moves.get(window, moves[0])(c, lanes[pick], a_part)
        return out

    return fetch


def putter(ins: Ins, space: str, n: int) -> Put:
    """Move n-byte items into ``space``: callable(chunk, ix, addresses, items)."""
    if space == "global":
        return lambda c, ix, a, value: c.globals.store(ins, c, ix, a, n, value)
    if space in ("shared", "local"):
        return _arena_put(ins, space, n)
    if space == "param":
        raise ins.unsupported("kernel parameters are read-only")
    return _generic_put(ins, n)


def _arena_put(ins: Ins, space: str, n: int) -> Put:
    shift = SHIFT[n]

    def put(c: Any, ix: Any, a: np.ndarray, value: np.ndarray) -> None:
        arena = c.shared if space == "shared" else c.local
        at = arena.index(ins, c, ix, a, n)
        where = at >> shift
        if space == "shared" and c.race is not None:
            c.race.write(ins, c, ix, at, n, value)
        arena.views[n][where] = value
        if c.uninit is not None:
            c.uninit.stored_bytes(arena, at, n)

    return put


def _generic_put(ins: Ins, n: int) -> Put:
    moves = {w: putter(ins, s, n) for w, s in _WINDOW_SPACES.items() if s != "param"}

    def put(c: Any, ix: Any, a: np.ndarray, value: np.ndarray) -> None:
        parts = _split_windows(a)
        lanes = lanes_of(c, ix)
        for window, pick in parts:
            move = moves.get(window, moves[0])
            if pick is None:
                move(c, ix, _local_address(window, a), value)
            else:
                move(c, lanes[pick], _local_address(window, a[pick]), value[pick])

    return put


def vector_shape(ins: Ins) -> tuple[str, int, int]:
    """(type, bytes per element, elements) of a load or store."""
    count = next((int(m[1:]) for m in ins.mods if m in ("v2", "v4", "v8")), 1)
    return ins.type, type_bytes(ins.type), count


def load(ins: Ins) -> Step:
    """ld and ldu of every space, width and vector length."""
    type_name, size, count = vector_shape(ins)
    mem, space = memory_operand(ins, 1), space_of(ins)
    if space == "param" and mem.origin == "slot":
        space = "local"
    target = ins.ops[0]
    parts = target.items if isinstance(target, Vector) else (target,)
    if len(parts) != count:
        raise ins.unsupported(f"{count} destinations expected")
    n, elem = size * count, UNSIGNED[8 * size]
    signed = type_name[0] == "s"
    writes = [writer(ins, p, 8 * size, signed) for p in parts]
    address, fetch = addresser(ins, mem, space), fetcher(ins, space, n)
    indices = tuple(None if isinstance(p, Sink) else p.index for p in parts)
    first, key = writes[0], f"load_{space}"

    def run(c: Any, ix: Any) -> None:
        got = fetch(c, ix, address(c, ix))
        if count == 1:
            first(c, ix, got)
        else:
            columns = got.view(elem).reshape(-1, count)
            for j, write in enumerate(writes):
                write(c, ix, columns[:, j])
        c.bytes[key] += c.count(ix) * n
        if c.uninit is not None:
            c.uninit.loaded_registers(indices, size, c, ix)

    return run


def store(ins: Ins) -> Step:
    """st of every space, width and vector length."""
    type_name, size, count = vector_shape(ins)
    mem, space = memory_operand(ins, 0), space_of(ins)
    if space == "param" and mem.origin == "slot":
        space = "local"
    source = ins.ops[1]
    parts = source.items if isinstance(source, Vector) else (source,)
    if len(parts) != count:
        raise ins.unsupported(f"{count} sources expected")
    n, elem = size * count, UNSIGNED[8 * size]
    reads = [reader(ins, p, 8 * size, type_name) for p in parts]
    address, put = addresser(ins, mem, space), putter(ins, space, n)
    only, key, carrier = reads[0], f"store_{space}", CARRIER[n]
    indices = tuple(p.index if isinstance(p, Reg) else None for p in parts)

    def run(c: Any, ix: Any) -> None:
        lanes = c.count(ix)
        a = address(c, ix)
        if len(a) != lanes:
            a = np.broadcast_to(a, (lanes,))
        if count == 1:
            value = only(c, ix)
            if len(value) != lanes:
                value = np.broadcast_to(value, (lanes,))
        else:
            packed = np.empty((lanes, count), elem)
            for j, read in enumerate(reads):
                packed[:, j] = read(c, ix)
            value = packed.view(carrier)[:, 0]
        if c.uninit is not None:
            c.uninit.storing(ins, c, ix, indices, space)
        put(c, ix, a, value)
        c.progress += 1
        c.bytes[key] += lanes * n

    return run


def cvta(ins: Ins) -> Step:
    """cvta.space (to generic) and cvta.to.space."""
    space, to = space_of(ins), "to" in ins.mods
    bits = type_bytes(ins.type) * 8
    read, write = reader(ins, ins.ops[1], bits), writer(ins, ins.ops[0], bits)
    if space == "global" or bits == 32:
        return lambda c, ix: write(c, ix, read(c, ix))
    base = np.uint64(WINDOWS[space])
    if to:
        return lambda c, ix: write(c, ix, read(c, ix) & _OFFSET_MASK)
    return lambda c, ix: write(c, ix, read(c, ix) | base)


def isspacep(ins: Ins) -> Step:
    """Whether a generic address lies in a space's window."""
    window = WINDOWS.get(space_of(ins), 0) >> WINDOW_SHIFT
    read, write = reader(ins, ins.ops[1], 64), writer(ins, ins.ops[0], 1)
    shift, only_own = np.uint64(WINDOW_SHIFT), bool({"shared", "shared::cta"} & set(ins.mods))

    def run(c: Any, ix: Any) -> None:
        a = read(c, ix)
        inside = (a >> shift) == window
        if only_own and c.shared.cluster is not None:
            lanes = lanes_of(c, ix)
            owner = c.shared.cluster.owner(lanes, (a & _OFFSET_MASK).view(np.int64))
            inside = inside & (owner == c.cta_of_lane[lanes])
        write(c, ix, inside)

    return run


def createpolicy(ins: Ins) -> Step:
    """Cache policies have no effect here; the register gets a fixed value."""
    write = writer(ins, ins.ops[0], 64)
    value = np.zeros(1, np.uint64)
    return lambda c, ix: write(c, ix, value)


def nothing(ins: Ins) -> Step:
    """Hints and fences that a sequentially executing emulator can ignore."""
    return lambda c, ix: None


RULES: dict[str, Callable[[Ins], Step]] = {
    "ld": load,
    "ldu": load,
    "st": store,
    "cvta": cvta,
    "isspacep": isspacep,
    "createpolicy": createpolicy,
    "applypriority": nothing,
    "discard": nothing,
    "membar": nothing,
    "pmevent": nothing,
    "griddepcontrol": nothing,
}
