"""Results of several runs in one bench.json: a run of some cases adds to those of before."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SCHEMA = 2
Found = dict[str, Any]  # what bench.json holds


class OtherResults(Exception):
    """The folder's results are not of this kind; the message says of which."""


def load(folder: Path, size: str) -> Found | None:
    """Results in the folder that a run of this size may add to; None if there are none.
    OtherResults for those of another size or format."""
    path = folder / "bench.json"
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text())
        kind = found["schema"], found["size"]
    except (ValueError, KeyError, TypeError) as error:
        raise OtherResults(f"{path} is no result of the suite") from error
    if kind != (SCHEMA, size):
        raise OtherResults(f"{path} has results of a {kind[1]} run in format {kind[0]}")
    return found


def measured(found: Found | None) -> set[str]:
    """Titles of the cases that have a result."""
    return {case["title"] for case in found["cases"] if case["contenders"]} if found else set()


def merged(earlier: Found | None, now: Found, order: Sequence[str]) -> Found:
    """Results of a run besides those of before, in the order of titles; a case that was measured
    again replaces what was. Runs of which nothing is left are dropped."""
    if earlier is None:
        return now
    runs = [*earlier["runs"], *now["runs"]]
    cases = {case["title"]: case for case in earlier["cases"]}
    for case in now["cases"]:
        if case["contenders"] or case["left_out"] or case["title"] not in cases:
            cases[case["title"]] = {**case, "run": case["run"] + len(earlier["runs"])}
    used = sorted({case["run"] for case in cases.values()} | {len(runs) - 1})
    places = {title: place for place, title in enumerate(order)}
    kept = [{**case, "run": used.index(case["run"])} for case in cases.values()]
    kept.sort(key=lambda case: places.get(case["title"], len(places)))
    skipped = earlier["skipped"] | now["skipped"]
    return {
        **now, "runs": [runs[i] for i in used], "cases": kept,
        "skipped": {title: why for title, why in skipped.items() if title not in cases},
    }  # fmt: skip
