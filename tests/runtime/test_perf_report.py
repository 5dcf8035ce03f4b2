"""Tables of measurements: `testing.perf_report`."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from minitriton import testing


def bench(**changes: Any) -> testing.Benchmark:
    given: dict[str, Any] = {
        "x_names": ["M", "N"], "x_vals": [16, (32, 64)], "line_arg": "provider",
        "line_vals": ["a", "b"], "line_names": ["A", "B"], "plot_name": "speed",
        "args": {"scale": 2}, "ylabel": "GB/s", "styles": [("blue", "-"), ("green", "--")],
    }  # fmt: skip
    return testing.Benchmark(**{**given, **changes})


@testing.perf_report(bench())
def measured(M: int, N: int, provider: str, scale: int, offset: int = 0) -> Any:
    speed = float(M * N * scale + offset)
    return speed if provider == "a" else (speed + 1, speed, speed + 2)


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert measured.run(print_data=True, offset=1) is None
    title, heads, *rows = capsys.readouterr().out.splitlines()
    assert title == "speed:"
    assert heads.split() == ["M", "N", "A", "(GB/s)", "B", "(GB/s)"]
    assert rows[1].split() == ["1", "32", "64", "4097.000000", "4098.000000"]


def test_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    measured.run(save_path=tmp_path / "new")
    rows = list(csv.reader((tmp_path / "new" / "speed.csv").open()))
    assert rows[0] == ["M", "N", "A (GB/s)", "B (GB/s)"]
    assert rows[1] == ["16", "16", "512.0", "513.0"]
    assert (tmp_path / "new" / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_several_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    both = [bench(plot_name="first"), bench(plot_name="second")]
    testing.perf_report(both)(measured.fn).run(print_data=True)
    printed = capsys.readouterr().out
    assert "first:" in printed and "second:" in printed


def test_x_values_must_fit_their_names() -> None:
    wrong = testing.perf_report(bench(x_vals=[(1, 2, 3)]))(measured.fn)
    with pytest.raises(ValueError, match="2 x_names"):
        wrong.run()
