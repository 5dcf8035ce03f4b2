"""The command line, run in this process except for the start-up time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from minitriton.__main__ import main

KERNEL = """
import minitriton as triton
import minitriton.language as tl

@triton.jit
def add(x, y, n, BLOCK: tl.constexpr, EVEN: tl.constexpr = False):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    tl.store(y + i, tl.load(x + i, mask=m) + tl.load(y + i, mask=m), mask=m)

NOT_A_KERNEL = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kernels_of_test.py"
    path.write_text(KERNEL)
    return path


def test_compile_to_standard_output(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            ["compile", f"{file}:add", "--target", "sm_90a", "--signature", "*fp32:16,*fp32,i32,64"]
        )
        == 0
    )
    text = capsys.readouterr().out
    assert ".target sm_90a" in text
    assert ".entry add(" in text


def test_compile_all_forms_to_files(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [
        "compile",
        f"{file}:add",
        "--signature",
        "*fp32,*fp32,i32",
        "--constexpr",
        "BLOCK=64",
    ]
    assert main([*command, "--emit", "all", "-o", str(out)]) == 0
    assert sorted(p.name for p in out.iterdir()) == ["add.cubin", "add.mlir", "add.ptx", "add.sass"]
    assert (out / "add.cubin").read_bytes()[:4] == b"\x7fELF"
    assert "func.func" in (out / "add.mlir").read_text()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["{file}:sub"], "no kernel 'sub'; it has: add"),
        (["{file}:NOT_A_KERNEL"], "no kernel"),
        (["missing.py:add"], "existing file"),
        (["{file}:add", "--signature", "*fp32"], "needs 3 types|needs 4 types"),
        (["{file}:add", "--constexpr", "BLOK=3"], "NAME of: x, y, n, BLOCK"),
        (["{file}:add", "--signature", "*fp32:8,*fp32,i32,64"], "only ':16'"),
    ],
)
def test_wrong_use(
    file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], match: str
) -> None:
    assert main(["compile", *(a.format(file=file) for a in arguments)]) == 2
    import re

    assert re.search(match, capsys.readouterr().err)


def test_unknown_target(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    signature = "*fp32,*fp32,i32,64"
    assert main(["compile", f"{file}:add", "--target", "sm_1", "--signature", signature]) == 1
    assert "known targets: sm_80" in capsys.readouterr().err


def test_cache_commands(file: Path, cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["compile", f"{file}:add", "--signature", "*fp32,*fp32,i32,64"])
    capsys.readouterr()
    assert main(["cache", "info"]) == 0
    assert f"{cache_dir}: 1 entries" in capsys.readouterr().out
    (entry,) = cache_dir.glob("objects/*/*.mtc")
    assert main(["cache", "verify"]) == 0
    entry.write_bytes(entry.read_bytes()[:-1])
    assert main(["cache", "verify"]) == 1
    assert f"broken: {entry}" in capsys.readouterr().out
    assert main(["cache", "clear"]) == 0
    assert not entry.exists()


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for piece in ("python", "nvidia-nvjitlink", "mlir bindings", "driver", "cache"):
        assert piece in text


def test_doctor_names_known_bad_assemblers(monkeypatch: pytest.MonkeyPatch) -> None:
    from minitriton import doctor
    from minitriton.runtime import assembler

    monkeypatch.setattr(assembler, "loaded_version", lambda: (13, 0))
    bad = [f for f in doctor.examine() if f.state == "bad"]
    assert [f.topic for f in bad] == ["nvjitlink"]
    assert "fixed in 13.1" in bad[0].text


def test_help_lists_the_commands() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "minitriton", "--help"], capture_output=True, text=True, check=True
    )
    assert all(command in done.stdout for command in ("compile", "doctor", "cache"))
