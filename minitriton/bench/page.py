"""The results as one HTML file that needs nothing else."""

from __future__ import annotations

from html import escape
from typing import Any

from minitriton.bench.report import Table, ceilings_line, left_out, machine_line, runs_of, tables

STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #8884; white-space: nowrap; }
th, td { text-align: right; }
th:first-child, td:first-child { text-align: left; }
.best { font-weight: 700; } .failed { color: #c0392b; }
figure { margin: 1rem 0; background: #fff; } svg { max-width: 100%; height: auto; }
code { overflow-wrap: anywhere; }
"""
RULES = (
    "All contenders of a case run in one process, interleaved in an order that changes, and the "
    "median of the rounds is shown. Before each timed call with a cold L2 a buffer of 256 MB is "
    "written; a warm L2 is left by the same call. While the host queues a round the GPU waits, so "
    "times are those of the device alone.",
    "Inputs are random. Outputs are filled with NaN and compared with an exact reference before "
    "timing, and after it on inputs that are new. A result above the roof is an error and is "
    "taken out.",
    "minitriton and triton compile the same source, each at its best of the same configurations; "
    "minitriton 192 takes it in tiles that are no powers of two; triton tma is the persistent "
    "kernel over tensor descriptors; torch is cuBLAS, cuDNN or FlashAttention, whichever is "
    "faster; fla and liger are fla-core and liger-kernel; copy is torch's copy of as many bytes, "
    "half of them read and half written; the roof is what the run of the case measured.",
)


def render(found: dict[str, Any], svg: str = "") -> str:
    """The page; svg is the picture, as an element."""
    parts = [
        "<!doctype html>", '<html lang="en">', "<head>", '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        "<title>MiniTriton, roofline</title>", f"<style>{STYLE}</style>", "</head>", "<body>",
        "<h1>MiniTriton beside Triton and torch</h1>",
    ]  # fmt: skip
    for head, run in runs_of(found):
        parts.append(
            f"<p>{head.capitalize()}{escape(machine_line(run))}. {escape(run['started'])}.<br>"
            f"<code>{escape(run['command'])}</code><br>"
            f"{escape(ceilings_line(run)).capitalize()}.</p>"
        )
    if svg:
        parts.append(f"<figure>{svg}</figure>")
    for table in tables(found):
        parts += _table(table)
    parts += _details(found)
    absent = left_out(found)
    if absent:
        parts += ["<h2>Left out</h2>", "<ul>", *(f"<li>{escape(a)}</li>" for a in absent), "</ul>"]
    parts += ["<h2>How it was measured</h2>", *(f"<p>{escape(rule)}</p>" for rule in RULES)]
    return "\n".join([*parts, "</body>", "</html>", ""])


def _table(table: Table) -> list[str]:
    names = (*table.heads, *table.columns)
    heads = "".join(f"<th>{escape(name)}</th>" for name in names)
    lines = [f"<h2>{escape(table.caption)}</h2>", '<div class="scroll"><table>',
             f"<tr>{heads}</tr>"]  # fmt: skip
    for row in table.rows:
        cells = "".join(
            f'<td class="{"best" if i == row.best else "failed" if c == "failed" else ""}">'
            f"{escape(c)}</td>"
            for i, c in enumerate(row.cells)
        )
        first = "".join(f"<td>{escape(head)}</td>" for head in row.heads)
        lines.append(f"<tr>{first}{cells}</tr>")
    return [*lines, "</table></div>"]


def _details(found: dict[str, Any]) -> list[str]:
    """Configurations, quantiles, errors and host times of every result."""
    heads = ("case", "contender", "configuration", "of", "cold: median, 20 %, 80 % (us)",
             "host (us)", "error")  # fmt: skip
    lines = ["<h2>Every result</h2>", '<div class="scroll"><table>',
             "<tr>" + "".join(f"<th>{head}</th>" for head in heads) + "</tr>"]  # fmt: skip
    for case in found["cases"]:
        for name, entry in case["contenders"].items():
            cold = entry.get("cold")
            times = [cold[key] * 1e6 for key in ("median", "q20", "q80")] if cold else []
            cells = (
                case["title"], name, entry["configuration"], str(entry["tried"]),
                ", ".join(f"{t:.1f}" for t in times),
                "" if entry["host"] is None else f"{entry['host'] * 1e6:.0f}",
                f"{entry['error']:.1e}",
            )  # fmt: skip
            lines.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return [*lines, "</table></div>"]
