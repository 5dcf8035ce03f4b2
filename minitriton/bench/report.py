"""Results as tables: for the terminal, for a README, and as rows for the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minitriton.bench.catalog import COPY

ORDER = (
    "minitriton", "minitriton 192", "minitriton library", "minitriton tma", "triton",
    "triton tma", "torch", "torch.compile", "fla", "liger", COPY,
)  # fmt: skip
MODES = {
    "cold": "L2 cold",
    "warm": "L2 warm",
    "sustained": "back to back, at the clocks which power allows",
}


@dataclass(frozen=True)
class Row:
    """A case in one mode, ready to print."""

    heads: tuple[str, ...]  # what stands before the cells: title, unit, number of the run
    cells: tuple[str, ...]  # one a column
    best: int | None  # which column is fastest


@dataclass(frozen=True)
class Table:
    caption: str
    heads: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[Row, ...]


def columns_of(found: dict[str, Any]) -> tuple[str, ...]:
    """Contenders that have a result anywhere."""
    seen = {name for case in found["cases"] for name in case["contenders"]}
    return tuple(name for name in ORDER if name in seen)


def tables(found: dict[str, Any]) -> list[Table]:
    """One table a mode that was measured; that of the errors after a dry run."""
    columns = columns_of(found)
    several = len(found["runs"]) > 1
    titles = ("case", "unit", *["run"] * several)
    made = []
    for mode, caption in MODES.items():
        cases = [c for c in found["cases"] if any(mode in e for e in c["contenders"].values())]
        if cases:
            rows = tuple(_row(case, columns, mode, several) for case in cases)
            made.append(Table(caption, titles, columns, rows))
    if not made and columns:
        rows = tuple(_error_row(case, columns, several) for case in found["cases"])
        made.append(Table("relative error, nothing was timed", titles, columns, rows))
    return made


def speed(case: dict[str, Any], seconds: float) -> tuple[float, str]:
    """Rate in the unit that bounds the case."""
    if case["bound"] == "compute":
        return case["flop"] / seconds / 1e12, "TFLOP/s"
    return case["bytes"] / seconds / 1e12, "TB/s"


def _heads(case: dict[str, Any], unit: str, several: bool) -> tuple[str, ...]:
    return (case["title"], unit, *[str(case["run"] + 1)] * several)


def _row(case: dict[str, Any], columns: tuple[str, ...], mode: str, several: bool) -> Row:
    medians = {n: e[mode]["median"] for n, e in case["contenders"].items() if mode in e}
    cells, unit = [], speed(case, 1.0)[1]
    for name in columns:
        if name not in medians:
            cells.append("failed" if _failed(case, name) else "")
            continue
        value, _ = speed(case, medians[name])
        share = case["contenders"][name][mode]["fraction"]
        text = f"{value:.3f}" if unit == "TB/s" else f"{value:.0f}"
        cells.append(text + (f" ({share:.0%})" if share is not None else ""))
    best = _fastest(medians)
    place = columns.index(best) if best is not None else None
    return Row(_heads(case, unit, several), tuple(cells), place)


def _fastest(medians: dict[str, float]) -> str | None:
    """Whose time is the shortest; the copy is a yardstick and no contender."""
    names = [name for name in medians if name != COPY]
    return min(names, key=medians.__getitem__, default=None)


def _error_row(case: dict[str, Any], columns: tuple[str, ...], several: bool) -> Row:
    entries = case["contenders"]
    cells = [
        f"{entries[n]['error']:.1e}" if n in entries else "failed" if _failed(case, n) else ""
        for n in columns
    ]
    return Row(_heads(case, "error", several), tuple(cells), None)


def _failed(case: dict[str, Any], name: str) -> bool:
    return bool(case["left_out"].get(name, {}).get("failed"))


def runs_of(found: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The runs, each with what to call it; nothing where there is but one."""
    runs = found["runs"]
    return [(f"run {i}: " if len(runs) > 1 else "", run) for i, run in enumerate(runs, 1)]


def ceilings_line(run: dict[str, Any]) -> str:
    ceilings = run["ceilings"]
    if ceilings is None:
        return "no ceilings: nothing was timed"
    rates = ", ".join(f"{name} {rate / 1e12:.0f}" for name, rate in ceilings["rates"].items())
    memory = ", ".join(
        f"{name} {ceilings[key] / 1e12:.2f}"
        for key, name in (("copy", "copy"), ("read", "read"), ("cached", "copy within L2"))
    )
    return f"ceilings of this run: {memory} TB/s; matrix products {rates} TFLOP/s"


def machine_line(run: dict[str, Any]) -> str:
    machine = run["machine"]
    known = {"name": "", "driver_version": "driver ", "torch": "torch ", "triton": "Triton ",
             "fla": "fla-core ", "liger": "liger-kernel "}  # fmt: skip
    parts = [prefix + str(machine[key]) for key, prefix in known.items() if key in machine]
    return ", ".join(parts) or "the emulator"


def left_out(found: dict[str, Any]) -> list[str]:
    """Who did not take part, where and why; the same reason is told once a contender."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for case in found["cases"]:
        for name, why in case["left_out"].items():
            first_line = why["reason"].splitlines()[0] if why["reason"] else "no reason given"
            reasons.setdefault((name, first_line), []).append(case["title"])
    lines = []
    for (name, reason), titles in reasons.items():
        where = titles[0] if len(titles) == 1 else f"{titles[0]} and {len(titles) - 1} more"
        lines.append(f"{name} in {where}: {reason}")
    return lines + [f"{title}: not measured: {why}" for title, why in found["skipped"].items()]


def markdown(found: dict[str, Any]) -> str:
    """The tables for a document, with what is needed to read them."""
    lines = []
    for head, run in runs_of(found):
        lines += [f"{head}`{run['command']}`, {run['started']}, {machine_line(run)};",
                  f"{ceilings_line(run)}.", ""]  # fmt: skip
    lines += ["Share of the roof in brackets, best in bold.", ""]
    for table in tables(found):
        lines += [f"**{table.caption}**", ""]
        lines.append(f"| {' | '.join((*table.heads, *table.columns))} |")
        lines.append("|---" * (len(table.heads) + len(table.columns)) + "|")
        for row in table.rows:
            cells = [f"**{c}**" if i == row.best else c for i, c in enumerate(row.cells)]
            lines.append(f"| {' | '.join((*row.heads, *cells))} |")
        lines.append("")
    absent = left_out(found)
    if absent:
        lines += ["Left out:", "", *(f"- {line}" for line in absent), ""]
    return "\n".join(lines)


LIBRARY = "minitriton library"


def library_markdown(results: Sequence[dict[str, Any]]) -> str:
    """The library's functions with a cold L2 beside the fastest of the others (ours from plain
    source apart); of a case that several results have, that of the last run."""
    dated = [(r["runs"][case["run"]]["started"], case) for r in results for case in r["cases"]]
    cases = {case["title"]: case for _, case in sorted(dated, key=lambda pair: pair[0])}
    lines = ["| case | library (ms) | of the roof | fastest other (ms) | times as fast |",
             "|---|---|---|---|---|"]  # fmt: skip
    for title, case in sorted(cases.items()):
        medians = {n: e["cold"]["median"] for n, e in case["contenders"].items() if "cold" in e}
        if LIBRARY not in medians:
            continue
        own, share = medians[LIBRARY], case["contenders"][LIBRARY]["cold"]["fraction"]
        others = {n: t for n, t in medians.items() if not n.startswith("minitriton")}
        cells = [title, f"{own * 1e3:.3f}", "" if share is None else f"{share:.0%}"]
        name = _fastest(others)
        if name is None:
            cells += ["", ""]
        else:
            cells += [f"{name} {others[name] * 1e3:.3f}", f"{others[name] / own:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def show(found: dict[str, Any]) -> None:
    """The same on the terminal."""
    from rich.console import Console
    from rich.table import Table as Shown
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console.width = 200  # a log has no width to fit
    for head, run in runs_of(found):
        console.print(Text(head + machine_line(run)))
        console.print(Text(ceilings_line(run)))
    for table in tables(found):
        names = (*table.heads, *table.columns)
        shown = Shown(*names, title=table.caption, title_justify="left")
        for column in shown.columns[len(table.heads) :]:
            column.justify = "right"
        for row in table.rows:
            cells = [Text(c, "bold" if i == row.best else "") for i, c in enumerate(row.cells)]
            shown.add_row(*map(Text, row.heads), *cells)
        console.print(shown)
    for line in left_out(found):
        console.print(Text(f"left out: {line}"))
