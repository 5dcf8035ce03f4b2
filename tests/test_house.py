"""The promises that the repository makes about itself: sizes, layering, tables, packaging."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("frontend", "ir", "passes", "codegen", "runtime")
FILE_LINES, FUNCTION_LINES = 600, 70
FLOOR = ("tests", "examples", "benchmarks")  # our files outside the package
# ops that no rule of code generation lowers: the rules of reduce and scan read the region's end
LOWERED_WITH_PARENT = {"mt.yield"}
# room -> rooms that it may import; `minitriton` itself may import all
ALLOWED = {
    "ir": set(),
    "frontend": {"ir"},
    "passes": {"ir"},
    "codegen": {"ir"},
    "runtime": {"ir"},
    "runtime/emulator": {"runtime.tensor_map"},  # plain data that a launch hands over
}


def sources() -> Iterator[Path]:
    """Every Python file of the package, each once (rooms by their real place)."""
    for folder in ("minitriton", *ROOMS):
        for directory, folders, names in os.walk(ROOT / folder, followlinks=False):
            folders[:] = [f for f in folders if f != "__pycache__"]
            yield from (Path(directory) / name for name in names if name.endswith(".py"))


SOURCES = sorted(sources())
UNSAFE = {"pickle", "dill", "cloudpickle", "marshal", "shelve"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@dataclass(frozen=True)
class Facts:
    """What the tests ask about a file; the trees themselves would slow down garbage collection."""

    text: str
    has_docstring: bool
    functions: tuple[tuple[str, int, bool], ...]  # name, lines, whether it is a list of steps
    imports: tuple[tuple[str, tuple[str, ...]], ...]  # module ("." first if relative), names
    has_globals: bool


@functools.cache
def facts_of(path: Path) -> Facts:
    text = path.read_text()
    tree = ast.parse(text)
    functions, imports, has_globals = [], [], False
    for node in statements(tree.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = (node.end_lineno or 0) - node.lineno + 1
            functions.append((node.name, size, is_table(node)))
        elif isinstance(node, ast.Import):
            imports += [(alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            imports.append(("." * node.level + (node.module or ""), names))
        has_globals |= isinstance(node, ast.Global)
    documented = bool(ast.get_docstring(tree)) or not tree.body
    return Facts(text, documented, tuple(functions), tuple(imports), has_globals)


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements, nested ones too."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            yield from statements(getattr(node, part, ()))
        for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            yield from statements(part.body)


def is_table(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A function whose body is one straight list of steps may be longer."""
    return all(isinstance(s, ast.Assign | ast.Expr | ast.Return | ast.With) for s in function.body)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_file(path: Path) -> None:
    """Size limits, a docstring, no globals, no pickle, no eval, absolute imports."""
    facts = facts_of(path)
    lines = facts.text.splitlines()
    assert len(lines) <= FILE_LINES
    assert facts.has_docstring
    for name, size, table in facts.functions:
        assert size <= (4 * FUNCTION_LINES if table else FUNCTION_LINES), name
    assert not facts.has_globals
    for module, _ in facts.imports:
        assert not module.startswith("."), f"relative import of {module}"
        assert module.split(".")[0] not in UNSAFE
    assert not re.search(
        r"(?<!def )(?<![\w.])eval\(|\b(TODO|FIXME|XXX)\b|NotImplementedError", facts.text
    )
    for line in lines:
        if "type:" in line and (ignored := re.search(r"#\s*type:\s*ignore(.*)", line)):
            assert re.match(r"\[[a-z, -]+\]  # \w", ignored[1]), f"no code and reason: {line}"


def test_files_outside_the_package_are_short() -> None:
    for folder in FLOOR:
        for path in (ROOT / folder).rglob("*.py"):
            assert len(path.read_text().splitlines()) <= FILE_LINES, name_of(path)


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
        for name, _ in facts_of(path).imports:
            if name.startswith("minitriton") and not any(
                name == good or name.startswith(good + ".") for good in allowed
            ):
                wrong.append(f"{relative} imports {name}")
    # the glue in runtime hands PTX to the emulator by name only
    assert not wrong


def test_every_pass_has_its_tests() -> None:
    """A pass of passes/pipeline.py is tested in a file of its name."""
    pipeline = facts_of(ROOT / "passes" / "pipeline.py")
    (names,) = (names for module, names in pipeline.imports if module == "minitriton.passes")
    missing = [n for n in names if not (ROOT / "tests" / "passes" / f"test_{n}.py").exists()]
    assert names and not missing


def test_every_op_is_lowered_and_has_a_meaning() -> None:
    """Each op of the tile dialect, and nothing else of ours, is in both tables."""
    from minitriton.codegen.lower import rules
    from minitriton.ir import interpret, interpret_ops
    from minitriton.ir.context import op_names

    ops = set(op_names())
    declared = r'MT\.Operation, name="(\w+)"'
    texts = [path.read_text() for path in (ROOT / "ir").glob("*.py")]
    assert ops == {f"mt.{name}" for text in texts for name in re.findall(declared, text)}
    ours = {name for name in rules() if name.startswith("mt.")}
    assert ours == ops - LOWERED_WITH_PARENT
    meanings = {*interpret.RULES, *interpret.TERMINATORS}
    meanings |= {*interpret_ops.BINARY, *interpret_ops.UNARY, *interpret_ops.CASTS}
    assert {name for name in meanings if name.startswith("mt.")} == ops


def test_legal_ops_are_lowered_and_have_a_meaning() -> None:
    """What `legality` lets pass is known to code generation and to the interpreter."""
    from minitriton.codegen.lower import rules
    from minitriton.ir import interpret, interpret_ops
    from minitriton.passes import legality

    legal = {f"arith.{name}" for name in legality.ARITH} | {f"math.{n}" for n in legality.MATH}
    legal |= legality.CONTROL
    assert legal - interpret.TERMINATORS <= set(rules())
    meanings = {*interpret.RULES, *interpret.TERMINATORS}
    assert legal <= meanings | {*interpret_ops.BINARY, *interpret_ops.UNARY, *interpret_ops.CASTS}


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
