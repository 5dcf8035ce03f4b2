"""Straight runs of instructions compiled to one Python function each.

A run starts at any pc and ends before the next jump, jump target or blocking instruction; while
a warp is split it also ends before every warp-wide instruction. The source of a run is a few
lines per instruction: arithmetic inline on register rows, everything else a call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minitriton.runtime.emulator.alu import Alu
from minitriton.runtime.emulator.decode import Blocking, Branch, Decoded, Exit
from minitriton.runtime.emulator.module import Ins, Mem, Program, Reg, SReg
from minitriton.runtime.emulator.operands import UNSIGNED, constant_bits
from minitriton.runtime.emulator.syntax import Immediate, Not

MAX_RUN = 4096


@dataclass(slots=True)
class Run:
    """Instructions [start, end) as ``fn(chunk, ix)``; ``control`` is what stands at ``end``."""

    start: int
    end: int
    fn: Callable[[Any, Any], None] | None
    control: Branch | Exit | Blocking | None
    lanes: int = 0
    warps: int = 0


@dataclass(slots=True)
class Blocks:
    """The compiled runs of a program, made when first executed."""

    program: Program
    decoded: list[Decoded]
    runs: dict[tuple[int, bool, bool, int], Run] = field(default_factory=dict)

    def get(self, pc: int, full: bool, whole: bool, trace: int) -> Run:
        """The run at ``pc``: ``full`` for all lanes of the chunk, ``whole`` for whole warps.

        ``trace`` 1 cuts runs after loads that may bring in undefined bytes, 2 after every
        instruction (while undefined values are live).
        """
        key = (pc, full, whole, trace)
        run = self.runs.get(key)
        if run is None:
            run = self.runs[key] = self._compile(*key)
        return run

    def _extent(self, pc: int, full: bool, whole: bool, trace: int) -> tuple[int, bool]:
        """(end, whether control may follow at once) of the run at ``pc``.

        Lanes that are all together need not stop at jump targets: nobody can join them.
        """
        code, end = self.program.code, pc
        while end < len(code) and end - pc < MAX_RUN:
            if end > pc:
                before = code[end - 1]
                if trace == 2 or (trace == 1 and may_load_undefined(before)):
                    return end, False
                if not full and end in self.program.branch_targets:
                    return end, False
                if not whole and is_warp_wide(code[end]):
                    return end, False
            if isinstance(self.decoded[end], Branch | Exit | Blocking):
                return end, True
            end += 1
        return end, False

    def _compile(self, pc: int, full: bool, whole: bool, trace: int) -> Run:
        end, controlled = self._extent(pc, full, whole, trace)
        item = self.decoded[end] if controlled else None
        control = item if isinstance(item, Branch | Exit | Blocking) else None
        if end == pc:
            return Run(pc, end, None, control)
        writer = _Writer(full)
        for at in range(pc, end):
            writer.instruction(self.program.code[at], self.decoded[at])
        return Run(pc, end, writer.finish(f"run_{pc}_{end}"), control)


_WARP_WIDE = frozenset({"shfl", "vote", "match", "redux", "elect", "ldmatrix", "stmatrix",
                        "mma", "movmatrix", "wgmma", "setmaxnreg"})  # fmt: skip


def is_warp_wide(ins: Ins) -> bool:
    """Whether the instruction names other lanes of its warp and must meet them."""
    return ins.op in _WARP_WIDE or (ins.op == "bar" and ins.mods[:1] == ("warp",))


def may_load_undefined(ins: Ins) -> bool:
    """Whether the instruction reads memory whose bytes may never have been written."""
    if ins.op != "ld":
        return ins.op == "ldmatrix"
    known = any(isinstance(o, Mem) and o.origin == "kparam" for o in ins.ops)
    return not known and "global" not in ins.mods and "const" not in ins.mods


class _Writer:
    """Collects the source of one run and the objects it refers to."""

    def __init__(self, full: bool) -> None:
        self.full = full
        self.lines: list[str] = []
        self.rows: set[int] = set()
        self.specials: dict[str, str] = {}
        self.names: dict[str, Any] = {
            "copyto": np.copyto,
            "count_nonzero": np.count_nonzero,
            "flatnonzero": np.flatnonzero,
        }

    def instruction(self, ins: Ins, item: Decoded) -> None:
        if isinstance(item, Alu):
            self._alu(ins, item)
        else:
            self._step(ins, item)

    def _name(self, prefix: str, value: Any) -> str:
        name = f"{prefix}{len(self.names)}"
        self.names[name] = value
        return name

    def _row(self, reg: Reg) -> str:
        self.rows.add(reg.index)
        return f"r{reg.index}"

    def _source(self, operand: Any, bits: int, literal: str, ix: str) -> str:
        if isinstance(operand, Reg):
            text = self._row(operand) + (f"[{ix}]" if ix else "")
            if operand.bits > bits:
                text += f".astype({self._name('t', UNSIGNED[bits])})"
            return text
        if isinstance(operand, Immediate):
            return self._name("k", constant_bits(operand, bits, literal))
        if isinstance(operand, SReg):
            key = self.specials.setdefault(operand.name, f"s{len(self.specials)}")
            text = f"({key} if len({key}) == 1 else {key}[{ix}])" if ix else key
            return f"{text}.astype({self._name('t', UNSIGNED[bits])}, copy=False)"
        if isinstance(operand, Not):
            return f"(~{self._source(operand.operand, bits, literal, ix)})"
        return self._name("k", np.zeros(1, UNSIGNED[bits]))

    def _call(self, item: Alu, ix: str) -> str:
        sources = ", ".join(self._source(o, b, t, ix) for o, b, t in item.sources)
        return f"{self._name('f', item.function)}({sources}"

    def _alu(self, ins: Ins, item: Alu) -> None:
        dest = self._row(item.dest)
        if self.full and ins.guard is None:
            if item.takes_out:
                self.lines.append(f"{self._call(item, '')}, out={dest})")
            else:
                self.lines.append(f"{dest}[...] = {self._call(item, '')})")
        elif self.full:
            reg, negate = ins.guard  # type: ignore[misc]  # those without are done above
            mask = ("~" if negate else "") + self._row(reg)
            self.lines.append(f"copyto({dest}, {self._call(item, '')}), where={mask})")
        elif ins.guard is None:
            self.lines.append(f"{dest}[ix] = {self._call(item, 'ix')})")
        else:
            self._select(ins)
            self.lines.append("if len(j):")
            self.lines.append(f"    {dest}[j] = {self._call(item, 'j')})")

    def _select(self, ins: Ins) -> None:
        reg, negate = ins.guard  # type: ignore[misc]  # asked for guarded ones only
        self.lines.append(f"j = ix[{'~' if negate else ''}{self._row(reg)}[ix]]")

    def _step(self, ins: Ins, step: Any) -> None:
        name = self._name("f", step)
        if ins.guard is None:
            self.lines.append(f"{name}(c, {'None' if self.full else 'ix'})")
        elif self.full:
            reg, negate = ins.guard
            row = self._row(reg)
            mask = f"~{row}" if negate else row
            self.lines.append(f"n = count_nonzero({row})")
            none, every = ("c.L", "0") if negate else ("0", "c.L")
            self.lines.append(f"if n != {none}:")
            self.lines.append(f"    {name}(c, None if n == {every} else flatnonzero({mask}))")
        else:
            self._select(ins)
            self.lines.append("if len(j):")
            self.lines.append(f"    {name}(c, j)")

    def finish(self, title: str) -> Callable[[Any, Any], None]:
        head = [f"def {title}(c, ix):"]
        if self.rows:
            head.append("    rows = c.rows")
            head += [f"    r{i} = rows[{i}]" for i in sorted(self.rows)]
        head += [f"    {key} = c.special({name!r})" for name, key in self.specials.items()]
        source = "\n".join(head + ["    " + line for line in self.lines])
        exec(compile(source, f"<ptx {title}>", "exec"), self.names)  # our own generated text
        return self.names[title]
