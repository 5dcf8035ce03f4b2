"""A PTX file made executable: operands, flat instructions, programs, and variables' images.

flatten.py turns the syntax tree into these; the rest of the emulator sees nothing else.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from typing import Any

from minitriton.runtime.emulator import syntax as ast
from minitriton.runtime.emulator.checks import Location, UnsupportedPTX

#: Windows of the generic address space that are not host memory (host pointers are < 2**47).
SHARED_WINDOW = 1 << 56
LOCAL_WINDOW = 2 << 56
PARAM_WINDOW = 3 << 56
WINDOW_SHIFT = 56


@dataclass(frozen=True, slots=True)
class Reg:
    """A numbered register of ``bits`` width (1 for predicates)."""

    index: int
    bits: int
    name: str


# Without the axis of those that have three.
_SPECIAL_NAMES = (
    "tid ntid ctaid nctaid laneid warpid nwarpid smid nsmid gridid clusterid nclusterid "
    "cluster_ctaid cluster_nctaid cluster_ctarank cluster_nctarank is_explicit_cluster "
    "lanemask_eq lanemask_lt lanemask_le lanemask_ge lanemask_gt clock clock_hi clock64 "
    "globaltimer globaltimer_lo total_smem_size aggr_smem_size dynamic_smem_size"
)
SPECIAL_REGISTERS = frozenset(_SPECIAL_NAMES.split())


@dataclass(frozen=True, slots=True)
class SReg:
    """A special register, e.g. ``tid.x``."""

    name: str


@dataclass(frozen=True, slots=True)
class Sink:
    """The ``_`` operand: a result nobody wants."""


@dataclass(frozen=True, slots=True)
class Mem:
    """A memory operand; ``origin`` is the kind of symbol it was based on, if any."""

    base: Any
    offset: int
    extra: tuple[Any, ...] = ()
    origin: str = ""


@dataclass(slots=True)
class Ins:
    """One flat instruction. ``targets`` are the pcs a branch may go to."""

    op: str
    mods: tuple[str, ...]
    ops: tuple[Any, ...]
    guard: tuple[Reg, bool] | None
    line: int
    loc: Location | None
    chain: tuple[Location, ...]
    pc: int = 0
    targets: tuple[Any, ...] = ()
    text: str = ""

    @property
    def type(self) -> str:
        return self.mods[-1] if self.mods else ""

    def unsupported(self, why: str = "") -> UnsupportedPTX:
        message = f"instruction {'.'.join((self.op, *self.mods))!r} is not supported"
        return UnsupportedPTX(
            f"{message}: {why}" if why else message,
            line=self.line,
            location=self.loc,
            details={"ptx": self.text},
            hint="the emulator implements what LLVM's NVPTX backend and MiniTriton emit",
        )


@dataclass(frozen=True, slots=True)
class KernelParam:
    name: str
    offset: int
    nbytes: int
    type: str


@dataclass(slots=True)
class Program:
    """One entry, flat."""

    name: str
    code: list[Ins] = field(default_factory=list)
    registers: list[Reg] = field(default_factory=list)
    params: tuple[KernelParam, ...] = ()
    param_bytes: int = 0
    static_shared: int = 0
    local_bytes: int = 0
    attributes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    branch_targets: frozenset[int] = frozenset()


_SIZES = {"pred": 1, "f16x2": 4, "bf16x2": 4, "bf16": 2, "tf32": 4, "u16x2": 4, "s16x2": 4,
          "e4m3x2": 2, "e5m2x2": 2, "e4m3x4": 4, "e5m2x4": 4, "e2m1x2": 1, "e2m3x2": 2,
          "e3m2x2": 2, "ue8m0x2": 2}  # fmt: skip


def type_bytes(name: str) -> int:
    """Bytes of a PTX type name without its dot, e.g. ``b32`` -> 4."""
    if name in _SIZES:
        return _SIZES[name]
    return int(re.sub(r"\D", "", name)) // 8


def align_up(value: int, align: int) -> int:
    return (value + align - 1) // align * align


def initial_bytes(variable: ast.Variable, addresses: dict[str, int]) -> bytes:
    """The initial image of a module variable; absent values are zero."""
    size = type_bytes(variable.type)
    total = size * (variable.count or 1)
    if variable.init is None:
        return bytes(total)
    image = bytearray()
    for item in re.findall(r"[^\s{},]+", variable.init.replace("generic(", "").replace(")", "")):
        if item in addresses:
            value = addresses[item]
        elif item[:2].lower() in ("0f", "0d"):
            value = int(item[2:], 16)
        elif variable.type in ("f32", "f64"):
            code = "<f" if size == 4 else "<d"
            value = int.from_bytes(struct.pack(code, float(item)), "little")
        else:
            value = int(item.rstrip("U"), 0)
        image += (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    return bytes(image.ljust(total, b"\0"))
