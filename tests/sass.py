"""What the assembler made of a kernel, read from nvdisasm's text."""

from __future__ import annotations

import re

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(.*?)\s*;")
_LABEL = re.compile(r"^\s*(\.L_x_\d+):")
_PLACE = re.compile(r"`\((\.L_x_\d+)\)")
# a branch that lanes of a warp may take apart; BRA.U is one of the whole warp
_PARTS = re.compile(r"@!?P\d+ +BRA(?!\.U) *`\((\.L_x_\d+)\)")
# what a warp executes once, not each of its lanes, so that a guard of the whole warp belongs to it
_OF_WARP = re.compile(r"@!?UP\d+ .*(UTMALDG|UTMASTG|UTMAREDG|UBLKCP|UBLKRED|SYNCS\.ARRIVE)")


def issued_apart(sass: str) -> list[str]:
    """Instructions of TMA that a warp executes under a vote of its lanes, where these may arrive in
    two parts: then it does so twice, which ptxas 13.5 makes of some predicated copies."""
    code, labels, regions = _read(sass)
    found = set()
    if not any(map(_OF_WARP.match, code)):
        return []
    for place, text in enumerate(code):
        branch = _PARTS.match(text)
        target = labels.get(branch[1], 0) if branch else 0
        meets = [end for start, end in regions if start < place < target < end]
        if target > place and meets:
            both = _reached(code, labels, place + 1) & _reached(code, labels, target)
            found |= {n for n in both if n < min(meets) and _OF_WARP.match(code[n])}
    return [code[n] for n in sorted(found)]


def _read(sass: str) -> tuple[list[str], dict[str, int], list[tuple[int, int]]]:
    """Instructions, where labels are among them, and the regions at whose ends lanes meet."""
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if match := _LABEL.match(line):
            labels[match[1]] = len(code)
        elif match := _INSTRUCTION.match(line):
            code.append(match[1])
    starts = [(n, _PLACE.search(text)) for n, text in enumerate(code) if "BSSY" in text]
    return code, labels, [(n, labels[end[1]]) for n, end in starts if end]


def _reached(code: list[str], labels: dict[str, int], first: int) -> set[int]:
    """Instructions that a lane comes to from there before it meets others."""
    seen: set[int] = set()
    ahead = [first]
    while ahead:
        place = ahead.pop()
        if place in seen or place >= len(code):
            continue
        seen.add(place)
        text = re.sub(r"^@!?U?PT?\d* +", "", code[place])
        stays = text != code[place] or re.match(r"BRA\S* +!?U?P\d", text) is not None
        ends = text.startswith(("BRA", "EXIT", "RET", "BSYNC"))
        if ends and text.startswith("BRA") and (target := _PLACE.search(text)):
            ahead.append(labels[target[1]])
        if not ends or (stays and not text.startswith("BSYNC")):
            ahead.append(place + 1)
    return seen
