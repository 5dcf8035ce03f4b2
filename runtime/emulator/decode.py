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
    calls,
    matrix,
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

#: Opcodes that may wait, and the builders of their `arrive`. Later engines (mbarrier, bulk
#: copies, wgmma) add their waiting instructions here and their objects to `Chunk.engines`.
BLOCKING: dict[str, Callable[[Ins], Callable[[Any, Any], bool]]] = {
    "bar": barriers.barrier,
    "barrier": barriers.barrier,
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
}


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
    if ins.op in BLOCKING:
        return Blocking(ins, BLOCKING[ins.op](ins))
    build = STEPS.get(ins.op)
    if build is None:
        raise ins.unsupported()
    try:
        return build(ins)
    except (KeyError, IndexError, StopIteration, ValueError, AttributeError) as problem:
        # Builders index operands and modifiers freely; a form they do not know ends here.
        raise ins.unsupported(f"unknown form ({type(problem).__name__}: {problem})") from None


def decode_all(program: Program) -> list[Decoded]:
    return [decode(ins) for ins in program.code]
