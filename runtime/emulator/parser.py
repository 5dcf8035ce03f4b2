"""PTX text to a typed syntax tree: a Lark LALR parse with the tree built in its callbacks.

The grammar is compiled on first use and kept for the process. Comments are blanked first so
that line numbers of the tree are line numbers of the text.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minitriton.runtime.emulator.checks import UnsupportedPTX
from minitriton.runtime.emulator.syntax import (
    Address,
    Body,
    FunctionDecl,
    Group,
    Immediate,
    Instruction,
    Label,
    Loc,
    Not,
    Pair,
    Register,
    RegisterDecl,
    Symbol,
    Targets,
    Tree,
    Variable,
    Vector,
)

_COMMENT = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/', re.S)
_INTEGER = re.compile(r"[+-]?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
_REGISTER = re.compile(r"%[\w$]+(\.\w+)?$")
_OFFSET = re.compile(r"^(.*?)\s*([+-])\s*([+-]?\s*\w+)$", re.S)


def _integer(text: str) -> int:
    text = text.replace(" ", "").rstrip("U")
    sign = -1 if text.startswith("-") else 1
    digits = text.lstrip("+-")
    if len(digits) > 1 and digits[0] == "0" and digits.isdigit():
        return sign * int(digits, 8)
    return sign * int(digits, 0)


def split_commas(text: str) -> list[str]:
    """Split at commas outside brackets."""
    if "[" not in text and "{" not in text and "(" not in text:
        return [part.strip() for part in text.split(",")]
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        if char in "[{(":
            depth += 1
        elif char in "]})":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return parts


@functools.lru_cache(maxsize=1 << 16)
def parse_operand(text: str) -> Any:
    """The operand written as ``text``."""
    first = text[:1]
    if first == "[":
        return _address(text[1:-1].strip())
    if first == "{":
        return Vector(tuple(parse_operand(t) for t in split_commas(text[1:-1].strip())))
    if first == "(":
        inner = text[1:-1].strip()
        return Group(tuple(parse_operand(t) for t in split_commas(inner)) if inner else ())
    if first == "!":
        return Not(parse_operand(text[1:].strip()))
    if "|" in text:
        left, right = text.split("|", 1)
        return Pair(parse_operand(left.strip()), parse_operand(right.strip()))
    if first == "%" and _REGISTER.match(text):
        return Register(text)
    if _INTEGER.match(text):
        return Immediate("i", _integer(text))
    return _symbol_or_float(text)


def _symbol_or_float(text: str) -> Any:
    if text[:2] in ("0f", "0F"):
        return Immediate("f32", int(text[2:], 16))
    if text[:2] in ("0d", "0D"):
        return Immediate("f64", int(text[2:], 16))
    match = _OFFSET.match(text)
    if match and re.match(r"[A-Za-z_$]", match[1]):
        sign = -1 if match[2] == "-" else 1
        return Symbol(match[1], sign * _integer(match[3]))
    try:
        return Immediate("f64", struct.unpack("<Q", struct.pack("<d", float(text)))[0])
    except ValueError:
        if not re.match(r"[\w$]+$", text):  # text of several lines: a semicolon is missing
            raise UnsupportedPTX(f"cannot parse operand {' '.join(text.split())!r}") from None
        return Symbol(text)


def _address(text: str) -> Address:
    head, *rest = split_commas(text)
    extra = tuple(parse_operand(t) for t in rest)
    match = _OFFSET.match(head)
    if match:
        sign = -1 if match[2] == "-" else 1
        return Address(parse_operand(match[1]), sign * _integer(match[3]), extra)
    base = parse_operand(head)
    if isinstance(base, Immediate):
        return Address(None, base.value, extra)
    return Address(base, 0, extra)


@functools.lru_cache(maxsize=1 << 14)
def _operands(text: str) -> tuple[Any, ...]:
    return tuple(parse_operand(t) for t in split_commas(text.strip()))


def _register_names(text: str) -> RegisterDecl:
    words = text.rstrip(";").strip().split(None, 1)[1]
    type_name, rest = words.split(None, 1)
    while rest.startswith("."):
        type_name, rest = rest.split(None, 1)
    names: list[str] = []
    for item in rest.split(","):
        item = item.strip()
        match = re.match(r"(%?[\w$]+)\s*<\s*(\d+)\s*>$", item)
        names.extend(f"{match[1]}{i}" for i in range(int(match[2]))) if match else names.append(
            item
        )
    return RegisterDecl(type_name[1:], tuple(names))


_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:.*?inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?", re.S)


class _Builder:
    """Lark callbacks: each rule's children to a node."""

    def start(self, items: list[Any]) -> list[Any]:
        return items

    def version(self, items: list[Any]) -> tuple[str, Any]:
        return ("version", str(items[0]))

    def target(self, items: list[Any]) -> tuple[str, Any]:
        return ("target", tuple(str(i) for i in items))

    def address_size(self, items: list[Any]) -> None:
        if str(items[0]) != "64":
            raise UnsupportedPTX("only .address_size 64 is supported", line=items[0].line)

    def file(self, items: list[Any]) -> tuple[str, Any]:
        return ("file", (int(items[0]), str(items[1])[1:-1]))

    def section(self, items: list[Any]) -> None:
        return None

    pragma = section

    def variable(self, items: list[Any]) -> Variable:
        space, type_name, name, align, init = "", "b8", "", 0, None
        count: int | None = 1
        vector, linkage = 1, []
        for token in items:
            kind, text = token.type, str(token)
            if kind == "SPACE":
                space = text[1:]
            elif kind == "LINKAGE":
                linkage.append(text[1:])
            elif kind == "TYPE" and text[1] == "v":
                vector = int(text[2:])
            elif kind == "TYPE":
                type_name = text[1:]
            elif kind == "ALIGN":
                align = int(text.split()[1])
            elif kind in ("NAME", "REGNAME"):
                name = text
            elif kind == "DIMS":
                count = _dimensions(text)
            elif kind == "INIT":
                init = text[1:].strip()
        total = None if count is None else count * vector
        line = items[0].line
        return Variable(space, type_name, name, align, total, init, tuple(linkage), line)

    def param(self, items: list[Any]) -> Variable:
        # A second space (`.param .u64 .ptr .global`) describes the pointee, not the parameter.
        kept = [t for i, t in enumerate(items) if t.type != "POINTER" and not (i and _pointee(t))]
        if any(t.type == "POINTER" for t in items):
            kept = [t for t in kept if t.type != "ALIGN"]
        return self.variable(kept)

    def params(self, items: list[Any]) -> tuple[Variable, ...]:
        return tuple(i for i in items if i is not None)

    def body(self, items: list[Any]) -> Body:
        return Body(tuple(i for i in items if i is not None))

    def label(self, items: list[Any]) -> Label:
        return Label(str(items[0])[:-1].strip(), items[0].line)

    def loc(self, items: list[Any]) -> Loc | None:
        match = _LOC.match(str(items[0]))
        if match is None:
            return None
        f, line, col, *at = match.groups()
        inlined = (int(at[0]), int(at[1]), int(at[2])) if at[0] else None
        return Loc(int(f), int(line), int(col), inlined)

    def registers(self, items: list[Any]) -> RegisterDecl:
        return _register_names(str(items[0]))

    def targets(self, items: list[Any]) -> Targets:
        words = str(items[0]).rstrip(";").split(None, 1)
        return Targets(tuple(split_commas(words[1]) if len(words) > 1 else ()))

    def instruction(self, items: list[Any]) -> Instruction:
        guard, i = None, 0
        if items[0].type == "GUARD":
            text = str(items[0])[1:]
            guard, i = (text.lstrip("! \t"), text[0] == "!"), 1
        try:
            operands = _operands(str(items[i + 1])) if len(items) > i + 1 else ()
        except UnsupportedPTX as problem:
            message = f"{problem.message} of {items[i]}"
            raise UnsupportedPTX(message, line=items[i].line) from None
        return Instruction(str(items[i]), operands, guard, items[i].line)

    def function(self, items: list[Any]) -> FunctionDecl:
        lists: list[tuple[Variable, ...]] = []
        name, entry, line, body = "", False, 0, None
        attributes: dict[str, tuple[int, ...]] = {}
        seen_name = False
        results: tuple[Variable, ...] = ()
        for item in items:
            if item is None:
                continue
            if isinstance(item, Body):
                body = item
            elif isinstance(item, tuple):
                if seen_name:
                    lists.append(item)
                else:
                    results = item
            elif item.type == "FUNCTION":
                entry, line = str(item) == ".entry", item.line
            elif item.type == "NAME":
                name, seen_name = str(item), True
            elif item.type == "FUNCATTR":
                words = str(item)[1:].replace(",", " ").split()
                attributes[words[0]] = tuple(int(w) for w in words[1:])
        return FunctionDecl(name, entry, results, lists[0] if lists else (), attributes, body, line)


def _pointee(token: Any) -> bool:
    return token.type == "SPACE"


def _dimensions(text: str) -> int | None:
    total = 1
    for inner in re.findall(r"\[\s*(\w*)\s*\]", text):
        if not inner:
            return None
        total *= _integer(inner)
    return total


@functools.cache
def _parser() -> Callable[[str], list[Any]]:
    import lark

    grammar = (Path(__file__).parent / "grammar.lark").read_text()
    return lark.Lark(
        grammar, parser="lalr", lexer="contextual", transformer=_Builder(), maybe_placeholders=True
    ).parse


def _blank(match: re.Match[str]) -> str:
    text = match[0]
    return text if text[0] == '"' else "\n" * text.count("\n") or " "


def parse(text: str) -> Tree:
    """The syntax tree of a PTX file; ``UnsupportedPTX`` names the line of a syntax error."""
    import lark

    try:
        items = _parser()(_COMMENT.sub(_blank, text.rstrip("\0")))
    except lark.exceptions.UnexpectedInput as error:
        line = getattr(error, "line", 0)
        lines = text.splitlines()
        shown = lines[line - 1].strip() if 0 < line <= len(lines) else "end of file"
        raise UnsupportedPTX(f"cannot parse PTX at {shown!r}", line=max(line, 0)) from None
    except lark.exceptions.VisitError as error:
        raise error.orig_exc from None
    tagged = [i for i in items if isinstance(i, tuple)]
    values = {tag: value for tag, value in tagged if tag != "file"}
    return Tree(
        values.get("version", ""),
        values.get("target", ()),
        dict(value for tag, value in tagged if tag == "file"),
        tuple(i for i in items if isinstance(i, Variable)),
        tuple(i for i in items if isinstance(i, FunctionDecl)),
        text.count("\n") + 1,
    )
