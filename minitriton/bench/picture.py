"""The roofline as a picture, PNG and SVG; matplotlib draws it and may be missing."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minitriton.bench.report import ORDER, columns_of, machine_line

FILES = ("roofline.png", "roofline.svg")
COLOURS = (  # in the order of the columns
    "#0b6e4f", "#14532d", "#31a67a", "#7bc8a4", "#d1495b", "#f08a5d", "#30638e", "#8d6a9f",
    "#b58900", "#6c757d", "#212529",
)  # fmt: skip
MARKERS = ("o", "h", "D", "P", "s", "X", "^", "v", "<", ">", "*")
NO_MATPLOTLIB = "it needs matplotlib: pip install 'minitriton[examples]'"


@dataclass(frozen=True)
class Drawing:
    """Files that were written, the SVG's text, or why there is none."""

    files: tuple[str, ...] = ()
    svg: str = ""
    missing: str = ""


def draw(found: dict[str, Any], folder: Path) -> Drawing:
    """Write the picture of the L2-cold results into the folder."""
    run = found["runs"][-1]  # the roof of the last run stands for those of the others
    if run["ceilings"] is None:
        return Drawing(missing="nothing was timed")
    if importlib.util.find_spec("matplotlib") is None:
        return Drawing(missing=NO_MATPLOTLIB)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.5), layout="constrained")
    axes = figure.subplots()
    _roofs(axes, found, run["ceilings"])
    _points(axes, found)
    axes.set(
        xscale="log", yscale="log", xlabel="FLOP per byte that must move", ylabel="FLOP/s",
        title=f"L2 cold, median. {machine_line(run)}",
    )  # fmt: skip
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", fontsize=8)
    for name in FILES:  # without the date equal results give equal files
        kind = {"Date": None} if name.endswith("svg") else {}
        figure.savefig(folder / name, dpi=150, metadata=kind)
    return Drawing(FILES, inline((folder / "roofline.svg").read_text()))


def inline(svg: str) -> str:
    """The <svg> element alone, without what names other places."""
    body = svg[svg.index("<svg") :]
    start, end = body.find("<metadata>"), body.find("</metadata>")
    return body if start < 0 else body[:start] + body[end + len("</metadata>") :]


def _roofs(axes: Any, found: dict[str, Any], ceilings: dict[str, Any]) -> None:
    used = {case["rate"] for case in found["cases"]} & set(ceilings["rates"])
    intensities = [case["intensity"] for case in found["cases"]] or [1.0]
    low, high = min(intensities) / 2, max(*intensities, 1e3) * 2
    for rate in sorted(used, key=lambda name: -ceilings["rates"][name]):
        top = ceilings["rates"][rate]
        ridge = top / ceilings["copy"]
        axes.plot([min(low, ridge), ridge, high], [min(low, ridge) * ceilings["copy"], top, top],
                  color="#777777", linewidth=1)  # fmt: skip
        text = f"{rate} {top / 1e12:.0f} TFLOP/s"
        # equal rates, bf16 and fp16 say, would print one label on the other
        below = sum(1 for other in used if top < ceilings["rates"][other] < 1.06 * top)
        axes.annotate(text, (high, top), xytext=(-90 * below, 1), textcoords="offset points",
                      fontsize=7, ha="right", va="bottom")  # fmt: skip
    middle = (low * 4, low * 4 * ceilings["copy"])
    axes.annotate(f"copy {ceilings['copy'] / 1e12:.2f} TB/s", middle, xytext=(-4, 4),
                  textcoords="offset points", fontsize=7, ha="right", va="bottom")  # fmt: skip


def _points(axes: Any, found: dict[str, Any]) -> None:
    for name in columns_of(found):
        at = ORDER.index(name)
        points = [
            (case["intensity"], case["flop"] / case["contenders"][name]["cold"]["median"])
            for case in found["cases"] if "cold" in case["contenders"].get(name, {})
        ]  # fmt: skip
        if points:
            axes.scatter(*zip(*points, strict=True), s=26, alpha=0.8, label=name,
                         color=COLOURS[at], marker=MARKERS[at], linewidths=0)  # fmt: skip
