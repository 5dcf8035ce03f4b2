"""Tables and curves of measurements: `testing.perf_report` and `testing.Benchmark`."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Benchmark:
    """What to measure: a call for each of `x_vals` (numbers, or one for each of `x_names`) and of
    `line_vals`, which are passed as `line_arg`. `args` are passed as they are."""

    x_names: Sequence[str]
    x_vals: Sequence[Any]
    line_arg: str
    line_vals: Sequence[Any]
    line_names: Sequence[str]
    plot_name: str
    args: Mapping[str, Any] = field(default_factory=dict)
    xlabel: str = ""
    ylabel: str = ""
    x_log: bool = False
    y_log: bool = False
    styles: Sequence[tuple[str, str]] | None = None

    def columns(self) -> list[str]:
        """Headings of the table."""
        unit = f" ({self.ylabel})" if self.ylabel else ""
        return [*self.x_names, *(f"{name}{unit}" for name in self.line_names)]


class Mark:
    """A function that is measured as its benchmarks say."""

    def __init__(self, fn: Callable[..., Any], benchmarks: Benchmark | Sequence[Benchmark]) -> None:
        self.fn, self.benchmarks = fn, benchmarks

    def run(
        self,
        show_plots: bool = False,
        print_data: bool = False,
        save_path: str | Path = "",
        return_df: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Measure; print tables, show curves, or write both (`.csv`, `.png`) into a folder.

        The function returns a number, or the number, the least and the greatest. Curves need
        matplotlib, `return_df` (a pandas.DataFrame for each benchmark) pandas.
        """
        single = isinstance(self.benchmarks, Benchmark)
        benchmarks = (
            [self.benchmarks] if isinstance(self.benchmarks, Benchmark) else self.benchmarks
        )
        frames = []
        for bench in benchmarks:
            rows = [self._row(bench, x, kwargs) for x in bench.x_vals]
            table = [row[: len(bench.columns())] for row in rows]
            if print_data:
                print(f"{bench.plot_name}:\n{_text(bench.columns(), table)}")
            if save_path:
                _write(Path(save_path), bench, table)
            if bench.plot_name and (show_plots or save_path):
                _plot(bench, rows, show_plots, save_path)
            if return_df:
                import pandas  # type: ignore[import-untyped]  # no stubs: optional

                frames.append(pandas.DataFrame(table, columns=bench.columns()))
        if not return_df:
            return None
        return frames[0] if single else frames

    def _row(self, bench: Benchmark, x: Any, further: Mapping[str, Any]) -> list[Any]:
        """The x values, what was measured for each line, then the least and greatest of each."""
        places = list(x) if isinstance(x, list | tuple) else [x] * len(bench.x_names)
        if len(places) != len(bench.x_names):
            raise ValueError(f"{bench.plot_name} has {len(bench.x_names)} x_names, not {x}")
        named = dict(zip(bench.x_names, places, strict=True))
        measured = []
        for line in bench.line_vals:
            found = self.fn(**named, **{bench.line_arg: line}, **bench.args, **further)
            measured.append(tuple(found) if isinstance(found, list | tuple) else (found,) * 3)
        return [*places, *(m[0] for m in measured), *((m[1], m[2]) for m in measured)]


def perf_report(benchmarks: Benchmark | Sequence[Benchmark]) -> Callable[[Any], Mark]:
    """Decorator: `function.run(print_data=True)` measures what `benchmarks` say."""
    return lambda fn: Mark(fn, benchmarks)


def _text(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table with aligned columns and numbered rows."""
    cells = [["", *columns]]
    for number, row in enumerate(rows):
        shown = (f"{v:.6f}" if isinstance(v, float) else str(v) for v in row)
        cells.append([str(number), *shown])
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns) + 1)]
    lines = ("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in cells)
    return "\n".join(lines)


def _write(folder: Path, bench: Benchmark, rows: Sequence[Sequence[Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{bench.plot_name}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(bench.columns())
        writer.writerows(rows)


def _plot(bench: Benchmark, rows: Sequence[Sequence[Any]], show: bool, folder: str | Path) -> None:
    """Curves over the first of `x_names`, with bands where the least and greatest differ."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    first, lines = len(bench.x_names), len(bench.line_vals)
    xs = [row[0] for row in rows]
    for i, name in enumerate(bench.line_names):
        color, style = bench.styles[i] if bench.styles else (None, "-")
        axes.plot(xs, [row[first + i] for row in rows], label=name, color=color, ls=style)
        low, high = zip(*(row[first + lines + i] for row in rows), strict=True)
        axes.fill_between(xs, low, high, alpha=0.15, color=color)
    axes.set(xlabel=bench.xlabel or bench.x_names[0], ylabel=bench.ylabel)
    axes.set(xscale="log" if bench.x_log else "linear", yscale="log" if bench.y_log else "linear")
    axes.legend()
    if folder:
        figure.savefig(Path(folder) / f"{bench.plot_name}.png")
    if show:
        pyplot.show()
    pyplot.close(figure)
