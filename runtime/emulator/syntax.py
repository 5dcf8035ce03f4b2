"""The typed syntax tree of a PTX file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Register:
    """A register, or a special register such as ``%tid.x``, by its written name."""

    name: str


@dataclass(frozen=True, slots=True)
class Immediate:
    """A literal: kind ``i`` holds a signed value, ``f32`` and ``f64`` hold raw bits."""

    kind: str
    value: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """A variable, label or function, with a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Address:
    """``[base+offset]``, with further comma-separated parts for tensor coordinates."""

    base: Any
    offset: int = 0
    extra: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Vector:
    """``{a, b, ...}``."""

    items: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """``a|b``: two destinations."""

    first: Any
    second: Any


@dataclass(frozen=True, slots=True)
class Not:
    """``!p``: a negated predicate operand."""

    operand: Any


@dataclass(frozen=True, slots=True)
class Group:
    """``(a, b)``: the argument or result list of a call."""

    items: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction as written; ``guard`` is (register, negated)."""

    opcode: str
    operands: tuple[Any, ...]
    guard: tuple[str, bool] | None
    line: int


@dataclass(frozen=True, slots=True)
class Label:
    name: str
    line: int


@dataclass(frozen=True, slots=True)
class Loc:
    """``.loc file line column``; ``inlined_at`` is the caller's (file, line, column)."""

    file: int
    line: int
    column: int
    inlined_at: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class RegisterDecl:
    type: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Targets:
    """``.branchtargets``: names in the order of the index."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A declared variable or parameter; ``count`` is None for ``[]``."""

    space: str
    type: str
    name: str
    align: int
    count: int | None
    init: str | None
    linkage: tuple[str, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Body:
    statements: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class FunctionDecl:
    """``.entry`` or ``.func``; ``body`` is None for a declaration."""

    name: str
    is_entry: bool
    results: tuple[Variable, ...]
    params: tuple[Variable, ...]
    attributes: dict[str, tuple[int, ...]]
    body: Body | None
    line: int


@dataclass(frozen=True, slots=True)
class Tree:
    """A whole PTX file."""

    version: str
    target: tuple[str, ...]
    files: dict[int, str]
    variables: tuple[Variable, ...]
    functions: tuple[FunctionDecl, ...]
    line_count: int = 0
