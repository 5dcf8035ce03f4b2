"""Instructions to executable form: a table from opcode to the builder of its behaviour.

A decoded instruction is an `Alu` (inline arithmetic), a step callable(chunk, ix), or one of the
control objects below, which end a run and are carried out by the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minitriton.runtime.emulator import (
    access,
    alu,
    async_copy,
    atomics,
    barriers,
    bulk_copy,
    calls,
    cluster,
    cluster_memory,
    fences,
    matrix,
    mbarrier,
    register_pool,
    warp,
    warpgroup,
)
from minitriton.runtime.emulator.alu import Alu
from minitriton.runtime.emulator.module import Ins, Program


@dataclass(frozen=True, slots=True)
class Branch:
    """A jump: one target, or a table with the ``index`` reader of brx.idx."""

    ins: Ins
    index: Callable[[Any, Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class Exit:
    """ret or exit of an entry."""

    ins: Ins


@dataclass(frozen=True, slots=True)
class Blocking:
    """An instruction that may have to wait.

    ``arrive(chunk, lanes)`` does its work; it returns None when the lanes go on, and otherwise
    has parked them (see `scheduler.Chunk.park`).
    """

    ins: Ins
    arrive: Callable[[Any, Any], bool]


Decoded = Alu | Callable[[Any, Any], None] | Branch | Exit | Blocking

#: Instructions that may wait, and the builders of their `arrive`. The most modifiers win.
BLOCKING: dict[str, Callable[[Ins], Callable[[Any, Any], bool]]] = {
    "bar": barriers.barrier,
    "barrier": barriers.barrier,
    "barrier.cluster": cluster.barrier_cluster,
    "mbarrier.try_wait": mbarrier.try_wait,
    "setmaxnreg": register_pool.setmaxnreg,
    "wgmma.wait_group": warpgroup.wait_group,
}

STEPS: dict[str, Callable[[Ins], Any]] = {
    **alu.RULES,
    **access.RULES,
    **atomics.RULES,
    **warp.RULES,
    **matrix.RULES,
    **calls.RULES,
    **async_copy.RULES,
    **warpgroup.RULES,
    **mbarrier.RULES,
    **bulk_copy.RULES,
    **cluster_memory.RULES,
    **fences.RULES,
}


def _find(table: dict[str, Any], ins: Ins) -> Any:
    """The entry for an instruction under its opcode and up to two modifiers."""
    for count in (2, 1, 0):
        found = table.get(".".join((ins.op, *ins.mods[:count])))
        if found is not None:
            return found
    return None


def decode(ins: Ins) -> Decoded:
    """The behaviour of one instruction; `UnsupportedPTX` names it when there is none."""
    if ins.op == "bra":
        return Branch(ins)
    if ins.op == "brx":
        return Branch(ins, access.reader(ins, ins.ops[0], 32))
    if ins.op in ("ret", "exit"):
        return Exit(ins)
    if ins.op == "bar" and ins.mods[:1] == ("warp",):
        return warp.warp_barrier(ins)
    waits, build = _find(BLOCKING, ins), _find(STEPS, ins)
    if waits is None and build is None:
        raise ins.unsupported()
    try:
        return Blocking(ins, waits(ins)) if waits is not None else build(ins)
    except (KeyError, IndexError, StopIteration, ValueError, AttributeError) as problem:
        # Builders index operands and modifiers freely; a form they do not know ends here.
        raise ins.unsupported(f"unknown form ({type(problem).__name__}: {problem})") from None


def decode_all(program: Program) -> list[Decoded]:
    return [decode(ins) for ins in program.code]
