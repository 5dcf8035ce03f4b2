"""Which assembler a kernel goes to: a ptxas where there is one, for it needs fewer registers."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minitriton.runtime import assembler


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    """What is installed is looked up anew, before and after."""
    cached = assembler.bundled_ptxas
    cached.cache_clear()
    yield
    cached.cache_clear()


def install(
    monkeypatch: pytest.MonkeyPatch, folder: Path, release: str | None, *, binary: bool = True
) -> Path:
    """As if the wheel nvidia-cuda-nvcc of a release were in `folder`; where its ptxas would be."""

    def version(name: str) -> str:
        if release is None or name != "nvidia-cuda-nvcc":
            raise metadata.PackageNotFoundError(name)
        return release

    path = folder / f"cu{(release or '0').split('.')[0]}" / "bin" / "ptxas"
    if binary:
        path.parent.mkdir(parents=True)
        path.touch()
    spec = SimpleNamespace(submodule_search_locations=[str(folder / "elsewhere"), str(folder)])
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    return path


@pytest.mark.parametrize("release", ["13.3.33", "13.10.1", "14.0.2"])
def test_a_wheel_that_is_new_enough(
    release: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = install(monkeypatch, tmp_path, release)
    assert assembler.bundled_ptxas() == str(path) and assembler.shares_registers()


@pytest.mark.parametrize(
    ("release", "binary"), [(None, False), ("13.2.80", True), ("12.9.1", True), ("13.3.33", False)]
)
def test_no_wheel_that_will_do(
    release: str | None, binary: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path, release, binary=binary)
    assert assembler.bundled_ptxas() == "" and not assembler.shares_registers()
    assert assembler.shares_registers("/usr/bin/ptxas")  # the user's own


@pytest.mark.parametrize(
    ("bundled", "own", "used"),
    [
        ("/bundled", "", "/bundled"),
        ("", "", "nvJitLink"),
        ("/bundled", "/own", "/own"),
    ],
)
def test_which_one_assembles(
    bundled: str, own: str, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str, *_: Any) -> tuple[bytes, str]:
        return name.encode(), ""

    monkeypatch.setattr(assembler, "bundled_ptxas", lambda: bundled)
    monkeypatch.setattr(assembler, "_run_ptxas", run)
    monkeypatch.setattr(assembler, "_run_nvjitlink", lambda *_: run("nvJitLink"))
    assert assembler.assemble("ret;", "sm_90a", "k", ptxas=own).cubin.decode() == used


@pytest.mark.parametrize(
    ("ptx", "own", "spilled", "used"),
    [
        ("ret;", "", {}, "/bundled"),
        ("ret;", "", {"/bundled": 8}, "nvJitLink"),
        ("ret;", "", {"/bundled": 8, "nvJitLink": 4}, "/bundled"),
        ("ret;", "/own", {"/own": 8}, "/own"),
        ("setmaxnreg.inc", "", {"/bundled": 8}, "/bundled"),
    ],
)
def test_nvjitlink_where_it_does_not_spill(
    ptx: str, own: str, spilled: dict[str, int], used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str, *_: Any) -> tuple[bytes, str]:
        frame = (
            f"0 bytes stack frame, {spilled.get(name, 0)} bytes spill stores, 0 bytes spill loads"
        )
        return name.encode(), f"Function properties for k\n{frame}"

    monkeypatch.setattr(assembler, "bundled_ptxas", lambda: "/bundled")
    monkeypatch.setattr(assembler, "_run_ptxas", run)
    monkeypatch.setattr(assembler, "_run_nvjitlink", lambda *_: run("nvJitLink"))
    assert assembler.assemble(ptx, "sm_90a", "k", ptxas=own).cubin.decode() == used


def test_the_version_says_whether_there_is_a_ptxas(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that kernels cached with one are not taken without it."""
    texts = []
    for bundled in ("/bundled", ""):
        monkeypatch.setattr(assembler, "bundled_ptxas", lambda bundled=bundled: bundled)
        texts.append(assembler.version())
    assert texts[0] != texts[1]


LOG = """ptxas info    : (C7517) wgmma.wait_group is injected in around line 11 by compiler
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas warning : Registers are spilled to local memory in function 'k', 8 bytes spill stores
ptxas info    : Used 168 registers, used 2 barriers
"""


def test_which_messages_are_warnings() -> None:
    report = assembler._report(b"", LOG, "k")
    assert [text[14:23] for text in report.warnings] == [": (C7517)", ": (C7510)", ": Registe"]
    assert report.registers == 168
