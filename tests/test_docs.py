"""The documents say what is there: names of the language, variables, examples, messages."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import json
import re
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import minitriton
import minitriton.language as tl
from minitriton.bench.report import library_markdown
from minitriton.options import Options
from minitriton.runtime.emulator import CHECKS, Allocation, Emulator, EmulatorError, parameter
from tests.generated_blocks import check_blocks, fenced

ROOT = Path(__file__).parent.parent
LANGUAGE = (ROOT / "docs" / "language.md").read_text()


def words_in_code(text: str) -> set[str]:
    """The identifiers inside `...` and in code blocks."""
    code = re.findall(r"```.*?```|`[^`]+`", text, re.DOTALL)
    return {word for part in code for word in re.findall(r"\w+", part)}


def public_names(module: types.ModuleType) -> list[str]:
    return list(module.__all__)


@pytest.mark.parametrize("name", public_names(tl))
def test_language_is_documented(name: str) -> None:
    assert name in words_in_code(LANGUAGE), f"tl.{name} is not in docs/language.md"


@pytest.mark.parametrize("module", [tl.math, tl.extra.libdevice], ids=lambda m: m.__name__)
def test_second_homes_are_documented(module: types.ModuleType) -> None:
    assert set(public_names(module)) <= words_in_code(LANGUAGE)


def test_methods_are_documented() -> None:
    from minitriton.frontend.methods import METHODS, PROPERTIES

    section = LANGUAGE.split("## Methods and attributes", 1)[1].split("\n## ", 1)[0]
    named = {name for name in METHODS if not name.startswith("atomic_")} | set(PROPERTIES)
    assert named <= words_in_code(section)


def test_what_is_said_to_be_missing_is_missing() -> None:
    section = LANGUAGE.split("## What Triton has and MiniTriton lacks", 1)[1]
    assert not words_in_code(section) & set(tl.__all__)


def test_variables_are_in_the_readme() -> None:
    table = [line for line in (ROOT / "README.md").read_text().splitlines() if line[:3] == "| `"]
    for field in dataclasses.fields(Options):
        variable = "MINITRITON_" + field.name.upper()
        assert any(re.search(rf"{variable}\b", line) for line in table), variable


def test_checks_are_documented() -> None:
    assert set(CHECKS) <= words_in_code((ROOT / "docs" / "emulator.md").read_text())


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


README_BLOCKS = python_blocks(ROOT / "README.md")


@pytest.mark.parametrize("block", README_BLOCKS, ids=range(len(README_BLOCKS)))
def test_readme_code_runs(block: str, tmp_path: Path) -> None:
    """Kernels need source files, so each block is a module of its own."""
    file = tmp_path / "readme_block.py"
    file.write_text(block)
    module = imported(file)
    if hasattr(module, "out"):
        assert bool((module.out == module.x + module.y).all())


def imported(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# docs/emulator.md


def message(error: EmulatorError) -> str:
    """Its text with addresses and folders taken out."""
    text = re.sub(r"0x[0-9a-f]{6,}", "0x7f...", str(error)).expandtabs(1)
    return text.replace(f"{ROOT}/", "")


def out_of_bounds(kernels: Any) -> str:
    x, out = np.ones(100, np.float32), np.zeros(100, np.float32)
    with pytest.raises(minitriton.runtime.emulator.OutOfBounds) as caught:
        kernels.copy[(1,)](x, out, 100, BLOCK=128)
    return message(caught.value)


def race(kernels: Any) -> str:
    out = np.zeros(64, np.int32)
    with pytest.raises(minitriton.runtime.emulator.SharedRace) as caught:
        Emulator(kernels.RACE).launch(
            "neighbour",
            grid=(1, 1, 1),
            block=(64, 1, 1),
            params=[parameter(out.ctypes.data)],
            allocations=[Allocation(out.ctypes.data, out.nbytes, "out")],
        )
    return message(caught.value)


def counters(kernels: Any) -> str:
    x, out = np.ones(100, np.float32), np.zeros(128, np.float32)
    report = kernels.copy[(1,)](x, out, 100, BLOCK=128).report
    lines = {line: 0 for (_, line, _) in sorted(report.lines)}
    for (_, line, _), count in report.lines.items():
        lines[line] += count
    rows = {
        "instructions": report.instructions,
        "lane_instructions": report.lane_instructions,
        "mix": dict(sorted(report.mix.items())),
        "bytes": dict(sorted(report.bytes.items())),
        "flops": dict(sorted(report.flops.items())),
        "lines": lines,
    }
    return "\n".join(f"{name:<18}{value}" for name, value in rows.items())


def test_emulator_examples(bless: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CHECK", "LANDING", "SCHEDULE", "TARGET"):
        monkeypatch.delenv(f"MINITRITON_{name}", raising=False)
    monkeypatch.setenv("MINITRITON_CACHE", "0")  # positions are those of this file
    file = ROOT / "docs" / "emulator_kernels.py"
    kernels = imported(file)
    source = file.read_text().split("@triton.jit\n", 1)[1]
    with contextlib.redirect_stdout(io.StringIO()):
        texts = {
            "copy": fenced("python", "@triton.jit\n" + source.split("\n\n\n")[0]),
            "out of bounds": fenced("text", out_of_bounds(kernels)),
            "neighbour": fenced("asm", kernels.RACE),
            "race": fenced("text", race(kernels)),
            "counters": fenced("text", counters(kernels)),
        }
    check_blocks(ROOT / "docs" / "emulator.md", texts, bless)


# docs/kernels.md


def test_library_speed(bless: bool) -> None:
    results = ROOT / "benchmarks" / "results"
    found = [json.loads((results / name / "bench.json").read_text())
             for name in ("full", "roofline")]  # fmt: skip
    texts = {"library speed": library_markdown(found)}
    check_blocks(ROOT / "docs" / "kernels.md", texts, bless)
