"""Blocks of a document that a test writes: from `<!-- begin: NAME -->` to `<!-- end -->`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path

_BLOCK = re.compile(r"(<!-- begin: (?P<name>[^\n]*?) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)


def check_blocks(path: Path, texts: Mapping[str, str], bless: bool) -> None:
    """Every block of `path` holds its text of `texts`; with `bless` it is written instead."""
    document = path.read_text()
    names = [match["name"] for match in _BLOCK.finditer(document)]
    assert sorted(names) == sorted(texts), f"blocks of {path.name}: {names}, made: {list(texts)}"
    fresh = _BLOCK.sub(lambda m: f"{m[1]}{texts[m['name']].rstrip()}\n{m[4]}", document)
    if bless:
        path.write_text(fresh)
        return
    lines = difflib.unified_diff(
        document.splitlines(), fresh.splitlines(), path.name, "made now", lineterm=""
    )
    assert document == fresh, "run pytest with --bless and read the diff:\n" + "\n".join(lines)


def fenced(language: str, text: str) -> str:
    """A code block."""
    return f"```{language}\n{text.strip()}\n```"
