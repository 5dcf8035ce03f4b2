"""atom and red on global and shared memory, exact for lanes that hit the same address.

Lanes take effect one after another: in lane order, or in a seeded permutation of it under the
random schedule. Different addresses are independent, so round k applies the k-th access of every
address at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minitriton.runtime.emulator import numerics
from minitriton.runtime.emulator.access import (
    WINDOWS,
    addresser,
    memory_operand,
    space_of,
)
from minitriton.runtime.emulator.memory import SHIFT
from minitriton.runtime.emulator.module import WINDOW_SHIFT, Ins, type_bytes
from minitriton.runtime.emulator.operands import lanes_of, reader, writer
from minitriton.runtime.emulator.syntax import Vector

Step = Callable[[Any, Any], None]
_OPERATIONS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")


def apply_in_order(
    items: np.ndarray, where: np.ndarray, update: Callable[..., Any], operands: list[np.ndarray]
) -> tuple[np.ndarray, bool]:
    """Update ``items[where]`` one access after another; returns old values and "changed".

    Equal indices see each other's results in array order.
    """
    order = np.argsort(where, kind="stable")
    sorted_where = where[order]
    fresh = np.empty(len(where), bool)
    fresh[:1] = True
    np.not_equal(sorted_where[1:], sorted_where[:-1], out=fresh[1:])
    old = np.empty(len(where), items.dtype)
    if fresh.all():
        before = items[where]
        after = update(before, *operands)
        items[where] = after
        return before, bool((before != after).any())
    starts = np.flatnonzero(fresh)
    rank = np.arange(len(where)) - starts[np.cumsum(fresh) - 1]
    changed = False
    by_rank = np.argsort(rank, kind="stable")
    bounds = np.concatenate([[0], np.cumsum(np.bincount(rank))])
    for k in range(len(bounds) - 1):
        pick = order[by_rank[bounds[k] : bounds[k + 1]]]
        at = where[pick]
        before = items[at]
        after = update(before, *(o[pick] for o in operands))
        items[at] = after
        old[pick] = before
        changed = changed or bool((before != after).any())
    return old, changed


def _operation(ins: Ins, name: str) -> Callable[..., Any]:
    try:
        return numerics.atomic(name, ins.type, "ftz" in ins.mods)
    except (numerics.UnsupportedOperation, KeyError) as problem:
        raise ins.unsupported(str(problem)) from None


def atomic(ins: Ins) -> Step:
    """atom (with a result) and red (without); vectors act element by element."""
    name = next((m for m in ins.mods if m in _OPERATIONS), None)
    if name is None or type_bytes(ins.type) > 8:
        raise ins.unsupported()
    returns = ins.op == "atom"
    position = 1 if returns else 0
    mem, space = memory_operand(ins, position), space_of(ins)
    size = type_bytes(ins.type)
    sources = ins.ops[position + 1 :][: 2 if name == "cas" else 1]
    columns = [s.items if isinstance(s, Vector) else (s,) for s in sources]
    count = len(columns[0])
    reads = [[reader(ins, o, 8 * size, ins.type) for o in column] for column in columns]
    dest = ins.ops[0]
    dests = (dest.items if isinstance(dest, Vector) else (dest,)) if returns else ()
    writes = [writer(ins, d, 8 * size) for d in dests]
    update, address = _operation(ins, name), addresser(ins, mem, space)
    key = f"atomic_{space}"

    def run(c: Any, ix: Any) -> None:
        lanes = lanes_of(c, ix)
        a = np.broadcast_to(address(c, ix), lanes.shape)
        if c.uninit is not None:
            c.uninit.storing(ins, c, ix, (), space)
        for j in range(count):
            values = [np.broadcast_to(group[j](c, ix), lanes.shape) for group in reads]
            offset = a.dtype.type(j * size)
            old = _at_addresses(ins, c, lanes, a + offset, space, size, update, values)
            if returns:
                writes[j](c, ix, old)
        c.bytes[key] += len(lanes) * size * count

    return run


def _at_addresses(
    ins: Ins,
    c: Any,
    lanes: np.ndarray,
    a: np.ndarray,
    space: str,
    size: int,
    update: Callable[..., Any],
    values: list[np.ndarray],
) -> np.ndarray:
    permutation = c.atomic_order(len(lanes))
    if permutation is not None:
        lanes, a = lanes[permutation], a[permutation]
        values = [v[permutation] for v in values]
    old = np.empty(len(lanes), f"u{size}")
    for items, where, pick in _targets(ins, c, lanes, a, space, size):
        chosen = values if pick is None else [v[pick] for v in values]
        got, changed = apply_in_order(items, where, update, chosen)
        old[... if pick is None else pick] = got
        c.progress += changed
    if permutation is None:
        return old
    restored = np.empty_like(old)
    restored[permutation] = old
    return restored


def _targets(ins: Ins, c: Any, lanes: np.ndarray, a: np.ndarray, space: str, size: int) -> Any:
    """(typed items, indices, selector) for each piece of memory the addresses fall in."""
    if space == "generic":
        in_shared = (a >> np.uint64(WINDOW_SHIFT)) == WINDOWS["shared"] >> WINDOW_SHIFT
        if in_shared.any():
            pick = np.flatnonzero(in_shared)
            local = (a[pick] - np.uint64(WINDOWS["shared"])).view(np.int64)
            for items, where, _ in _targets(ins, c, lanes[pick], local, "shared", size):
                yield items, where, pick
            rest = np.flatnonzero(~in_shared)
            if len(rest):
                for items, where, inner in _targets(ins, c, lanes[rest], a[rest], "global", size):
                    yield items, where, rest if inner is None else rest[inner]
            return
        space = "global"
    if space == "shared":
        at = c.shared.index(ins, c, lanes, a, size)
        if c.race is not None:
            c.race.atomic(ins, c, lanes, at, size)
        if c.uninit is not None:
            c.uninit.atomic_bytes(ins, c, lanes, c.shared, at, size)
        yield c.shared.views[size], at >> SHIFT[size], None
        return
    for region, pick in c.globals.pieces(ins, c, lanes, a, size, True):
        first, items = region.view(size)
        part = a if pick is None else a[pick]
        yield items, ((part - first) >> np.uint64(SHIFT[size])).view(np.int64), pick


RULES: dict[str, Callable[[Ins], Step]] = {"atom": atomic, "red": atomic}
