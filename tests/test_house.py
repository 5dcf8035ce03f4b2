"""The promises that the repository makes about itself: sizes, layering, packaging, links."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("frontend", "ir", "passes", "codegen", "runtime")
FILE_LINES, FUNCTION_LINES = 500, 60
# room -> rooms that it may import; `minitriton` itself may import all
ALLOWED = {
    "ir": set(),
    "frontend": {"ir"},
    "passes": {"ir"},
    "codegen": {"ir"},
    "runtime": {"ir"},
    "runtime/emulator": set(),
}


def sources() -> Iterator[Path]:
    """Every Python file of the package, each once (rooms by their real place)."""
    for folder in ("minitriton", *ROOMS):
        for directory, folders, names in os.walk(ROOT / folder, followlinks=False):
            folders[:] = [f for f in folders if f != "__pycache__"]
            yield from (Path(directory) / name for name in names if name.endswith(".py"))


SOURCES = sorted(sources())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_file(path: Path) -> None:
    """Size limits, a docstring, no globals, no pickle, absolute imports."""
    text = path.read_text()
    tree = ast.parse(text)
    lines = text.splitlines()
    assert len(lines) <= FILE_LINES, f"{len(lines)} lines"
    assert ast.get_docstring(tree) or not tree.body, "no docstring on top"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = (node.end_lineno or 0) - node.lineno + 1
            limit = FUNCTION_LINES if not is_table(node) else 4 * FUNCTION_LINES
            assert size <= limit, f"{node.name} has {size} lines"
        assert not isinstance(node, ast.Global), f"line {node.lineno}: a global statement"
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
        if isinstance(node, ast.Import | ast.ImportFrom):
            assert "pickle" not in ast.dump(node), f"line {node.lineno}: pickle"
    assert not re.search(r"\b(TODO|FIXME|XXX)\b|NotImplementedError", text)


def is_table(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A function whose body is one straight list of steps may be longer."""
    return all(isinstance(s, ast.Assign | ast.Expr | ast.Return | ast.With) for s in function.body)


@pytest.mark.parametrize("room", ALLOWED)
def test_dependencies_point_one_way(room: str) -> None:
    wrong = []
    for path in SOURCES:
        relative = path.relative_to(ROOT)
        if not str(relative).startswith(room + "/"):
            continue
        if room == "runtime" and "emulator" in relative.parts:
            continue
        own = "minitriton." + room.replace("/", ".")
        allowed = [own, *("minitriton." + other for other in ALLOWED[room])]
        for name in imports(path):
            if name.startswith("minitriton") and not any(
                name == good or name.startswith(good + ".") for good in allowed
            ):
                wrong.append(f"{relative} imports {name}")
    # the glue in runtime hands PTX to the emulator by name only
    assert not wrong


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_only_options_reads_our_variables() -> None:
    """`ir.mlir` must choose its provider at import, and says so."""
    for path in SOURCES:
        if name_of(path) in ("minitriton/options.py", "minitriton/doctor.py", "ir/mlir.py"):
            continue
        assert not re.search(r"environ.*MINITRITON_|getenv", path.read_text()), name_of(path)


def test_folders_are_the_packages() -> None:
    """Every folder with Python files is listed in pyproject.toml and mapped to where it lies."""
    settings = PROJECT["tool"]["setuptools"]
    folders = {path.parent.relative_to(ROOT) for path in SOURCES}
    expected = {
        ".".join(folder.parts if folder.parts[0] == "minitriton" else ("minitriton", *folder.parts))
        for folder in folders
    }
    assert set(settings["packages"]) == expected
    assert settings["package-dir"] == {
        "minitriton": "minitriton",
        **{f"minitriton.{room}": room for room in ROOMS},
    }


@pytest.mark.parametrize("room", ROOMS)
def test_links(room: str) -> None:
    link = ROOT / "minitriton" / room
    assert link.is_symlink()
    assert os.readlink(link) == f"../{room}"


def test_data_files_are_packaged() -> None:
    listed = PROJECT["tool"]["setuptools"]["package-data"]
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.lark"):
            package = ".".join(("minitriton", *path.parent.relative_to(ROOT).parts))
            assert any(path.match(pattern) for pattern in listed.get(package, ())), path
    assert (ROOT / "minitriton" / "py.typed").exists()


def test_dependencies_carry_their_reason() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    block = text.split("dependencies = [", 1)[1].split("\n]", 1)[0]
    lines = [line for line in block.splitlines() if line.strip()]
    assert len(lines) == len(PROJECT["project"]["dependencies"])
    assert all("#" in line and ">=" in line for line in lines)


@pytest.mark.parametrize("target", ["demo", "test", "check"])
def test_make_targets_set_themselves_up(target: str, tmp_path: Path) -> None:
    """A dry run from a clean state first makes the environment."""
    done = subprocess.run(
        ["make", "-n", f"VENV={tmp_path}/venv", f"PYTHON={sys.executable}", target],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    commands = done.stdout
    assert commands.index("-m venv") < commands.index("pip install")
    expected = {"demo": "examples/", "test": "pytest", "check": "mypy"}
    assert expected[target] in commands[commands.index("pip install") :]


def test_no_registry_host_is_named() -> None:
    for name in ("Makefile", ".ci/run", "pyproject.toml", "constraints.txt"):
        assert not re.search(r"https?://|index-url|pypi\.", (ROOT / name).read_text()), name
