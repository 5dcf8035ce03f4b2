"""Golden messages: each <mistake>.py holds a wrong kernel, <mistake>.err what its author is told.

A program defines `kernel` and `ARGUMENTS` (a type or a constexpr for each parameter). After a
wanted change of the messages run `pytest tests/errors --bless` and read the diff.
"""

from __future__ import annotations

import importlib.util
import types
from pathlib import Path

import pytest

from minitriton.ir.diagnostics import CompileError
from tests.frontend.support import build

HERE = Path(__file__).parent
PROGRAMS = sorted(
    p for p in HERE.glob("*.py") if p.name not in (Path(__file__).name, "conftest.py")
)


def load(path: Path) -> types.ModuleType:
    """The module of a program, loaded from its file."""
    spec = importlib.util.spec_from_file_location(f"errors_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def message_of(path: Path) -> str:
    """What compiling the program says, with paths relative to the corpus."""
    module = load(path)
    with pytest.raises(CompileError) as caught:
        build(module.kernel, **module.ARGUMENTS)
    text = str(caught.value)
    return text.replace(f"{HERE}/", "") + "\n"


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_message(path: Path, bless: bool) -> None:
    golden = path.with_suffix(".err")
    message = message_of(path)
    assert message.startswith("error: ")
    assert f"--> {path.name}:" in message, "the message names no place in the program"
    assert "^" in message
    for forbidden in ("Traceback", "internal error", "0x7f", "numba_cuda_mlir"):
        assert forbidden not in message
    assert "{" not in message.splitlines()[0], "a template was not filled in"
    if bless:
        golden.write_text(message)
    assert golden.exists(), f"no {golden.name}: run pytest --bless"
    assert message == golden.read_text()


def test_every_golden_message_has_its_program() -> None:
    stems = {path.stem for path in PROGRAMS}
    assert {path.stem for path in HERE.glob("*.err")} <= stems
    assert len(stems) >= 60
