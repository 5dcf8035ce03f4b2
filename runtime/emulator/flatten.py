"""Flattening: one entry of a PTX tree to straight code with jumps.

Resolves names through nested scopes, numbers registers, lays out shared and local memory,
attaches source positions, and expands calls of device functions in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minitriton.runtime.emulator import syntax as ast
from minitriton.runtime.emulator.block_order import reorder
from minitriton.runtime.emulator.checks import Location, UnsupportedPTX
from minitriton.runtime.emulator.module import (
    SPECIAL_REGISTERS,
    Ins,
    KernelParam,
    Mem,
    Program,
    Reg,
    Sink,
    SReg,
    align_up,
    type_bytes,
)

EXTERN_CALLS = ("vprintf", "__assertfail")
_MAX_CALL_DEPTH = 32


class _Scope:
    """Names visible at a point of the flattening."""

    def __init__(self, parent: _Scope | None) -> None:
        self.parent = parent
        self.names: dict[str, Any] = {}

    def find(self, name: str) -> Any:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.parent
        return None


class _Label:
    """A label object; its pc is known once the label has been passed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pc = -1


@dataclass(frozen=True, slots=True)
class _Place:
    """A variable's address in its space."""

    space: str
    offset: int


class _PendingRegister:
    """A declared register that gets its number at its first use."""

    def __init__(self, name: str, bits: int) -> None:
        self.name, self.bits = name, bits
        self.reg: Reg | None = None


class _Flattener:
    def __init__(self, tree: ast.Tree, addresses: dict[str, int], lines: list[str]) -> None:
        self.tree, self.lines = tree, lines
        self.functions = {f.name: f for f in tree.functions if f.body is not None}
        self.globals = _Scope(None)
        self.shared_end = 0
        self.externs: list[tuple[str, _Scope, int]] = []
        for variable in tree.variables:
            if variable.space == "shared":
                self._shared(variable, self.globals)
            elif variable.name in addresses:
                self.globals.names[variable.name] = _Place("global", addresses[variable.name])
        self.labels: list[_Label] = []

    # -- declarations
    def _shared(self, variable: ast.Variable, scope: _Scope) -> None:
        align = max(variable.align, type_bytes(variable.type))
        if variable.count is None or "extern" in variable.linkage:
            self.externs.append((variable.name, scope, align))
            return
        self.shared_end = align_up(self.shared_end, align)
        scope.names[variable.name] = _Place("shared", self.shared_end)
        self.shared_end += type_bytes(variable.type) * variable.count

    def _place_externs(self) -> None:
        base = align_up(self.shared_end, max([16, *(a for _, _, a in self.externs)]))
        for name, scope, _ in self.externs:
            scope.names[name] = _Place("shared", base)
        if self.externs:
            self.shared_end = base

    def _slot(self, variable: ast.Variable, scope: _Scope, kind: str) -> None:
        size = type_bytes(variable.type)
        self.out.local_bytes = align_up(self.out.local_bytes, max(size, variable.align, 1))
        scope.names[variable.name] = _Place(kind, self.out.local_bytes)
        self.out.local_bytes += size * (variable.count or 1)

    def _hoist(self, body: ast.Body, scope: _Scope) -> None:
        """Declare what may be used before its line: labels and variables of this block."""
        for s in body.statements:
            if isinstance(s, ast.Label):
                scope.names[s.name] = _Label(s.name)
            elif isinstance(s, ast.RegisterDecl):
                bits = 1 if s.type == "pred" else 8 * type_bytes(s.type)
                for name in s.names:
                    scope.names[name] = _PendingRegister(name, bits)
            elif isinstance(s, ast.Variable):
                if s.space == "shared":
                    self._shared(s, scope)
                elif s.space in ("local", "param"):
                    self._slot(s, scope, "local" if s.space == "local" else "slot")
                else:
                    raise UnsupportedPTX(f".{s.space} variable in a function body", line=s.line)

    # -- entry
    def run(self, decl: ast.FunctionDecl) -> Program:
        assert decl.body is not None
        self.out = Program(decl.name, attributes=dict(decl.attributes))
        scope, offset, params = _Scope(self.globals), 0, []
        for p in decl.params:
            size = type_bytes(p.type)
            offset = align_up(offset, max(size, p.align))
            params.append(KernelParam(p.name, offset, size * (p.count or 1), p.type))
            scope.names[p.name] = _Place("kparam", offset)
            offset += size * (p.count or 1)
        self.out.params, self.out.param_bytes = tuple(params), offset
        self._declare_shared_everywhere(decl.body)
        self.loc: Location | None = None
        self.chain: tuple[Location, ...] = ()
        self._body(decl.body, scope, None, 0)
        self._emit(ast.Instruction("exit", (), None, decl.line), scope)
        self._resolve_targets()
        self.out.static_shared = self.shared_end
        return self.out

    def _declare_shared_everywhere(self, body: ast.Body) -> None:
        # Module-level extern arrays start after every static array, so those come first.
        saved, self.externs = self.externs, []
        self.block_scopes: dict[int, _Scope] = {}
        self._shared_of_block(body)
        self.externs += saved
        self._place_externs()

    def _shared_of_block(self, body: ast.Body) -> None:
        scope = self.block_scopes[id(body)] = _Scope(None)
        for s in body.statements:
            if isinstance(s, ast.Variable) and s.space == "shared":
                self._shared(s, scope)
            elif isinstance(s, ast.Body):
                self._shared_of_block(s)
            elif isinstance(s, ast.Instruction) and s.opcode.startswith("call"):
                callee = self._callee(s)
                if callee and callee.body and id(callee.body) not in self.block_scopes:
                    self._shared_of_block(callee.body)

    def _callee(self, s: ast.Instruction) -> ast.FunctionDecl | None:
        for operand in s.operands:
            if isinstance(operand, ast.Symbol) and operand.name in self.functions:
                return self.functions[operand.name]
        return None

    # -- statements
    def _body(self, body: ast.Body, outer: _Scope, end: _Label | None, depth: int) -> None:
        scope = _Scope(outer)
        statements = [
            s for s in body.statements if not (isinstance(s, ast.Variable) and s.space == "shared")
        ]
        scope.names.update(self.block_scopes[id(body)].names)
        self._hoist(ast.Body(tuple(statements)), scope)
        last_label = ""
        for s in statements:
            if isinstance(s, ast.Instruction):
                self._instruction(s, scope, end, depth)
            elif isinstance(s, ast.Label):
                last_label = s.name
                self._mark(scope.names[s.name])
            elif isinstance(s, ast.Loc):
                self._location(s)
            elif isinstance(s, ast.Targets):
                labels = tuple(scope.find(n) for n in s.names)
                scope.names[last_label] = labels
            elif isinstance(s, ast.Body):
                self._body(s, scope, end, depth)

    def _mark(self, label: _Label) -> None:
        label.pc = len(self.out.code)

    def _location(self, s: ast.Loc) -> None:
        name = self.tree.files.get(s.file, f"<file {s.file}>")
        if s.line:
            self.loc = (name, s.line, s.column)
        if s.inlined_at:
            f, line, column = s.inlined_at
            self.chain = ((self.tree.files.get(f, f"<file {f}>"), line, column),)
        else:
            self.chain = ()

    def _instruction(
        self, s: ast.Instruction, scope: _Scope, end: _Label | None, depth: int
    ) -> None:
        if s.opcode.startswith("call"):
            callee = self._callee(s)
            if callee is not None:
                self._call(s, callee, scope, depth)
                return
        if s.opcode.startswith("ret") and end is not None:
            jump = self._emit(ast.Instruction("bra", (), s.guard, s.line), scope)
            jump.targets = (end,)
            return
        self._emit(s, scope)

    def _call(
        self, s: ast.Instruction, callee: ast.FunctionDecl, scope: _Scope, depth: int
    ) -> None:
        if s.guard is not None or depth >= _MAX_CALL_DEPTH:
            why = "recursive calls" if s.guard is None else "predicated calls"
            raise UnsupportedPTX(f"{why} are not supported", line=s.line, location=self.loc)
        groups = [o for o in s.operands if isinstance(o, ast.Group)]
        results = groups.pop(0) if callee.results and groups else ast.Group(())
        arguments = groups[0] if groups else ast.Group(())
        inner = _Scope(self.globals)
        formals = (*callee.results, *callee.params)
        actuals = (*results.items, *arguments.items)
        if len(formals) != len(actuals):
            raise UnsupportedPTX(
                f"{callee.name} has {len(formals)} parameters and results, {len(actuals)} given",
                line=s.line,
                location=self.loc,
            )
        for formal, actual in zip(formals, actuals, strict=True):
            place = scope.find(getattr(actual, "name", ""))
            if not isinstance(place, _Place):
                raise UnsupportedPTX("calls must pass .param variables", line=s.line)
            inner.names[formal.name] = place
        end = _Label(f"end of {callee.name}")
        saved = self.loc, self.chain
        assert callee.body is not None
        self._body(callee.body, inner, end, depth + 1)
        self._mark(end)
        self.loc, self.chain = saved

    def _emit(self, s: ast.Instruction, scope: _Scope) -> Ins:
        op, *mods = s.opcode.replace("::", "@").split(".")
        guard = None
        if s.guard is not None:
            guard = (self._register(s.guard[0], scope, s.line), s.guard[1])
        text = self.lines[s.line - 1].strip() if 0 < s.line <= len(self.lines) else ""
        ins = Ins(
            op,
            tuple(m.replace("@", "::") for m in mods),
            (),
            guard,
            s.line,
            self.loc,
            self.chain,
            len(self.out.code),
            (),
            text,
        )
        if op in ("bra", "brx"):
            ins.targets = self._branch(s, scope)
            operands = s.operands[:1] if op == "brx" else ()
        else:
            operands = s.operands
        ins.ops = tuple(self._operand(o, scope, s.line) for o in operands)
        self.out.code.append(ins)
        return ins

    def _branch(self, s: ast.Instruction, scope: _Scope) -> tuple[Any, ...]:
        if not s.operands:
            return ()
        target = scope.find(s.operands[-1].name)
        if isinstance(target, tuple):
            return target
        if not isinstance(target, _Label):
            raise UnsupportedPTX(f"unknown label {s.operands[-1].name!r}", line=s.line)
        return (target,)

    def _resolve_targets(self) -> None:
        seen: set[int] = set()
        for ins in self.out.code:
            ins.targets = tuple(label.pc for label in ins.targets)
            seen.update(ins.targets)
        self.out.branch_targets = frozenset(seen)

    # -- operands
    def _register(self, name: str, scope: _Scope, line: int) -> Reg:
        found = scope.find(name)
        if not isinstance(found, _PendingRegister):
            raise UnsupportedPTX(f"register {name!r} is not declared", line=line)
        if found.reg is None:
            found.reg = Reg(len(self.out.registers), found.bits, found.name)
            self.out.registers.append(found.reg)
        return found.reg

    def _operand(self, o: Any, scope: _Scope, line: int) -> Any:
        if isinstance(o, ast.Register):
            if isinstance(scope.find(o.name), _PendingRegister):
                return self._register(o.name, scope, line)
            if o.name[1:].split(".")[0] not in SPECIAL_REGISTERS:
                raise UnsupportedPTX(
                    f"register {o.name!r} is not declared", line=line, location=self.loc
                )
            return SReg(o.name[1:])
        if isinstance(o, ast.Immediate):
            return o
        if isinstance(o, ast.Symbol):
            return self._symbol(o, scope, line)
        if isinstance(o, ast.Address):
            return self._address(o, scope, line)
        if isinstance(o, ast.Vector):
            return ast.Vector(tuple(self._operand(i, scope, line) for i in o.items))
        if isinstance(o, ast.Pair):
            return ast.Pair(
                self._operand(o.first, scope, line), self._operand(o.second, scope, line)
            )
        if isinstance(o, ast.Not):
            return ast.Not(self._operand(o.operand, scope, line))
        return ast.Group(tuple(self._operand(i, scope, line) for i in o.items))

    def _symbol(self, o: ast.Symbol, scope: _Scope, line: int) -> Any:
        if o.name == "_":
            return Sink()
        found = scope.find(o.name)
        if isinstance(found, _PendingRegister):
            return self._register(o.name, scope, line)
        if isinstance(found, _Place):
            return ast.Immediate("i", found.offset + o.offset)
        if o.name in EXTERN_CALLS:
            return o
        if o.name == "WARP_SZ":
            return ast.Immediate("i", 32)
        raise UnsupportedPTX(
            f"unknown symbol {o.name!r}",
            line=line,
            location=self.loc,
            hint="external functions other than vprintf and __assertfail must be linked in",
        )

    def _address(self, o: ast.Address, scope: _Scope, line: int) -> Mem:
        extra = tuple(self._operand(i, scope, line) for i in o.extra)
        if isinstance(o.base, ast.Symbol):
            found = scope.find(o.base.name)
            if isinstance(found, _Place):
                offset = found.offset + o.base.offset + o.offset
                return Mem(None, offset, extra, found.space)
            return Mem(self._symbol(o.base, scope, line), o.offset, extra)
        base = None if o.base is None else self._operand(o.base, scope, line)
        return Mem(base, o.offset, extra)


def flatten(tree: ast.Tree, entry: str, addresses: dict[str, int], lines: list[str]) -> Program:
    """The flat program of ``entry``; ``addresses`` are the module variables' host addresses."""
    for decl in tree.functions:
        if decl.name == entry and decl.is_entry and decl.body is not None:
            return reorder(_Flattener(tree, addresses, lines).run(decl))
    names = [f.name for f in tree.functions if f.is_entry]
    raise UnsupportedPTX(f"no entry {entry!r}; the module has {names}")
