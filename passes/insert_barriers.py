"""Puts mt.barrier between shared-memory accesses of different ops that could race.

    before: local_store %b; local_load %b      after: local_store %b; mt.barrier; local_load %b

Requires: mt.offset on every op with memory. Ensures: on every path, loops included, a barrier lies
between two accesses of overlapping bytes of which one writes. Accesses to one multi-buffer marked
mt.pipelined are ordered by the pipeliner's own waits and barriers, up to its mt.local_dealloc.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from minitriton.ir.mlir import ir
from minitriton.ir.target import Target
from minitriton.passes.shared_usage import buffer_accesses, buffer_bytes, scratch_of
from minitriton.passes.tile_pass import PassOptions
from minitriton.passes.traversal import int_attribute, kernel_of, ops_of


@dataclass(frozen=True)
class Access:
    """Bytes [start, end) that were read or written since the last barrier."""

    start: int
    end: int
    writes: bool
    pipelined: int | None = None  # hash of the multi-buffer that orders its own accesses

    def conflicts(self, other: Access) -> bool:
        """Whether a barrier must lie between the two."""
        if self.pipelined is not None and self.pipelined == other.pipelined:
            return False
        overlap = self.start < other.end and other.start < self.end
        return overlap and (self.writes or other.writes)


@dataclass
class State:
    """`pending`: accesses since the last barrier; `flying`: async writes (and reads of
    warpgroup_dots) not yet waited for; `stored`: reads of tma_stores not yet waited for."""

    pending: frozenset[Access] = frozenset()
    flying: frozenset[Access] = frozenset()
    stored: frozenset[Access] = frozenset()

    def join(self, other: State) -> State:
        return State(
            self.pending | other.pending, self.flying | other.flying, self.stored | other.stored
        )


@dataclass(frozen=True)
class Effects:
    """One op: what it accesses before it meets a barrier of its own, and after it."""

    before: tuple[Access, ...] = ()
    meets: bool = False
    after: tuple[Access, ...] = field(default=())


def run(module: ir.Module, target: Target, options: PassOptions) -> None:
    """Inserts the barriers in place."""
    _Inserter().block(kernel_of(module).regions[0].blocks[0], State())


def effects_of(op: ir.Operation) -> Effects:
    """Shared-memory effects of one op without regions."""
    if op.name == "mt.barrier":
        return Effects(meets=True)
    scratch = scratch_of(op)
    if scratch is not None:
        start = int_attribute(op, "mt.offset")
        end = start + scratch.bytes
        if scratch.barrier:
            return Effects((Access(start, end, True),), True, (Access(start, end, False),))
        return Effects((Access(start, end, True),))
    accesses = []
    for alloc, writes in buffer_accesses(op):
        start = int_attribute(alloc, "mt.offset")
        end = start + buffer_bytes(alloc.results[0].type)
        own = hash(alloc) if "mt.pipelined" in alloc.attributes else None
        accesses.append(Access(start, end, writes, own))
    return Effects(tuple(accesses))


class _Inserter:
    """Abstract execution; only ever adds barriers, so repeating it over a loop converges."""

    def __init__(self) -> None:
        self._effects: dict[ir.Operation, Effects] = {}

    def block(self, block: ir.Block, state: State) -> State:
        """The state after `block`."""
        for op in ops_of(block):
            match op.name:
                case "scf.for":
                    state = self._for(op, state)
                case "scf.if":
                    state = self._if(op, state)
                case "scf.while":
                    state = self._while(op, state)
                case "mt.async_wait":
                    state = replace(state, pending=state.pending | state.flying)
                    if int_attribute(op, "pending") == 0:
                        state.flying = frozenset()
                case "mt.tma_store_wait":
                    state = replace(state, pending=state.pending | state.stored)
                    if int_attribute(op, "pending") == 0:
                        state.stored = frozenset()
                case "mt.local_dealloc":  # the same buffer may be filled anew by an outer loop
                    own = hash(op.operands[0].owner.operation)
                    ended = {replace(a, pipelined=None) if a.pipelined == own else a
                             for a in state.pending}  # fmt: skip
                    state = replace(state, pending=frozenset(ended))
                case _:
                    state = self._op(op, state)
        return state

    def _op(self, op: ir.Operation, state: State) -> State:
        effects = self._effects.get(op)
        if effects is None:
            effects = self._effects[op] = effects_of(op)
        pending = state.pending
        if any(a.conflicts(b) for a in effects.before for b in pending):
            ir.Operation.create("mt.barrier", loc=op.location, ip=ir.InsertionPoint(op))
            pending = frozenset()
        if effects.meets:
            return replace(state, pending=frozenset(effects.after))
        own = frozenset(effects.before)
        after = replace(state, pending=pending | own)
        if op.name == "mt.async_copy" or "mt.in_flight" in op.attributes:
            after.flying |= own
        elif op.name == "mt.tma_store":
            after.stored |= own
        return after

    def _for(self, op: ir.Operation, state: State) -> State:
        body = op.regions[0].blocks[0]
        entry = state
        while True:
            leaving = self.block(body, entry)
            merged = entry.join(leaving)
            if merged == entry:
                return state.join(leaving)
            entry = merged

    def _if(self, op: ir.Operation, state: State) -> State:
        ends = [self.block(block, state) for region in op.regions for block in region.blocks]
        if len(ends) < 2:
            ends.append(state)
        return ends[0].join(ends[1])

    def _while(self, op: ir.Operation, state: State) -> State:
        before, after = (region.blocks[0] for region in op.regions)
        entry = state
        while True:
            checked = self.block(before, entry)
            merged = entry.join(self.block(after, checked))
            if merged == entry:
                return checked
            entry = merged
