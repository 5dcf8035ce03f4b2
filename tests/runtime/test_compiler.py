"""The stage list, the disk cache around it, dumps and the assembler; most need no MLIR."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import minitriton.language as tl
from minitriton import compiler, fingerprint, options
from minitriton.frontend.signature import ParamSpec, Specialization
from minitriton.ir.diagnostics import CompileError, InternalError
from minitriton.ir.target import Target
from minitriton.language.extra import libdevice
from minitriton.runtime import assembler
from minitriton.runtime.driver import OutOfResources

TARGET = Target.parse("sm_80")
SPEC = Specialization(
    (
        ParamSpec("x", "pointer", "fp32"),
        ParamSpec("y", "pointer", "fp32"),
        ParamSpec("a", "scalar", "fp32"),
        ParamSpec("n", "scalar", "int32"),
    )
)


def make(pipeline: Any, source: Any, **changes: Any) -> Any:
    return compiler.compile_kernel(
        source, changes.pop("spec", SPEC), TARGET, stages=pipeline.stages(), **changes
    )


def test_second_compilation_comes_from_disk(pipeline: Any, fake_source: Any) -> None:
    first = make(pipeline, fake_source("axpy"))
    second = make(pipeline, fake_source("axpy"))
    assert (first.from_cache, second.from_cache, pipeline.builds) == (False, True, 1)
    assert first.ptx == second.ptx
    assert second.metadata == first.metadata


def test_cubin_is_added_to_the_entry_on_demand(pipeline: Any, fake_source: Any) -> None:
    made = make(pipeline, fake_source("axpy"))
    assert "cubin" not in compiler.disk_cache().get(key_of(fake_source("axpy"))).blobs
    assert made.n_regs > 4
    assert made.n_spills == 0
    entry = compiler.disk_cache().get(key_of(fake_source("axpy")))
    assert entry.blobs["cubin"] == made.asm["cubin"]
    again = make(pipeline, fake_source("axpy"), cubin=True)
    assert again.asm["cubin"] == made.asm["cubin"]
    assert again.n_regs == made.n_regs


def key_of(source: Any, spec: Specialization = SPEC, target: Target = TARGET) -> str:
    return compiler.key_text(source, spec, target, options.read())


def test_everything_that_matters_changes_the_key(
    fake_source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = fake_source("axpy")
    keys = {
        key_of(source),
        key_of(fake_source("axpy", "v2")),
        key_of(fake_source("other")),
        key_of(source, dataclasses.replace(SPEC, num_warps=8)),
        key_of(source, target=Target.parse("sm_90a")),
    }
    for owner, name in ((fingerprint, "build_id"), (assembler, "version")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda *_: "something else")
            keys.add(key_of(source))
    monkeypatch.setattr(compiler, "KEY_FORMAT", 999)
    keys.add(key_of(source))
    assert len(keys) == 8
    assert "/" not in fingerprint.build_id()


def test_the_key_covers_every_function_of_the_language() -> None:
    for function in (libdevice.erfc, libdevice.atan, tl.swizzle2d, tl.randn):
        assert function.__minitriton_source__.is_library  # so their text is in no other part
        path = Path(inspect.getsourcefile(function.__mt_fn__) or "")
        assert path.resolve() in {source.resolve() for source in fingerprint.sources()}


def test_switched_off_cache(
    pipeline: Any, fake_source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINITRITON_CACHE", "0")
    assert not make(pipeline, fake_source("axpy")).from_cache
    assert not make(pipeline, fake_source("axpy")).from_cache


def test_stage_texts_on_request(pipeline: Any, fake_source: Any) -> None:
    make(pipeline, fake_source("axpy"))
    warm = make(pipeline, fake_source("axpy"))
    assert pipeline.builds == 1
    assert warm.asm["build"] == "tile of axpy for sm_80"
    assert warm.asm["tile"] == warm.asm["simplify"] == "tile of axpy for sm_80 after simplify"
    assert warm.asm["lower"].startswith("lowered")
    assert pipeline.builds == 2
    assert list(warm.asm)[:2] == ["source", "build"]
    with pytest.raises(KeyError, match="no stage 'ttir'; there are: source, build, simplify"):
        warm.asm["ttir"]


def test_sass(pipeline: Any, fake_source: Any) -> None:
    if assembler.find_tool("nvdisasm") is None:
        pytest.skip("nvdisasm is not installed")
    assert "FFMA" in make(pipeline, fake_source("axpy")).asm["sass"]


def test_dump(
    pipeline: Any, fake_source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(pipeline, fake_source("axpy"))
    monkeypatch.setenv("MINITRITON_DUMP", str(tmp_path / "dump"))
    make(pipeline, fake_source("axpy"))  # compiled again, though it is in the cache
    (folder,) = (tmp_path / "dump").iterdir()
    names = sorted(p.name for p in folder.iterdir())
    expected = ["00-build.mlir", "01-simplify.mlir", "02-lower.mlir", "03-kernel.ptx"]
    assert names[:5] == [*expected, "04-kernel.cubin"]
    index = (folder / "index.txt").read_text()
    assert index.count("unchanged") == 2
    assert " ms  simplify" in index
    assert (folder / "03-kernel.ptx").read_text() == pipeline.ptx


def test_an_exception_in_a_stage_is_an_internal_error(pipeline: Any, fake_source: Any) -> None:
    def broken(*_: Any) -> Any:
        raise IndexError("off by one")

    stages = dataclasses.replace(pipeline.stages(), lower=broken)
    with pytest.raises(InternalError, match="stage 'lower': IndexError: off by one"):
        compiler.compile_kernel(fake_source("axpy"), SPEC, TARGET, stages=stages)


def test_a_compile_error_passes_through(pipeline: Any, fake_source: Any) -> None:
    def refuse(*_: Any) -> Any:
        raise CompileError("shapes differ")

    stages = dataclasses.replace(pipeline.stages(), build=refuse)
    with pytest.raises(CompileError, match="shapes differ"):
        compiler.compile_kernel(fake_source("axpy"), SPEC, TARGET, stages=stages)
    assert list(compiler.disk_cache().entries()) == []


def test_too_much_shared_memory(pipeline: Any, fake_source: Any) -> None:
    pipeline.metadata["shared_bytes"] = 170_000
    made = make(pipeline, fake_source("axpy"))
    with pytest.raises(OutOfResources, match="required: 170000, limit: 166912"):
        made.assemble()


def test_refused_ptx_names_the_line(axpy_ptx: str) -> None:
    wrong = axpy_ptx.replace("fma.rn.f32 %f3, %f1", "fma.rn.f32 %rd3, %f1")
    number = wrong[: wrong.index("fma.rn")].count("\n") + 1
    with pytest.raises(assembler.AssemblerError, match=f"line {number} of the PTX") as caught:
        assembler.assemble(wrong, "sm_80", "axpy")
    assert caught.value.line == number
    assert "fma.rn.f32 %rd3" in str(caught.value)


def test_assembling_is_deterministic_and_reports(axpy_ptx: str) -> None:
    first = assembler.assemble(axpy_ptx, "sm_90a", "axpy")
    assert first == assembler.assemble(axpy_ptx, "sm_90a", "axpy")
    assert first.registers > 4
    assert first.warnings == ()


def test_old_assemblers_are_refused(axpy_ptx: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembler, "bundled_ptxas", lambda: "")
    monkeypatch.setattr(assembler, "loaded_version", lambda: (13, 0))
    with pytest.raises(assembler.AssemblerError, match=r"13\.0 is too old.*MINITRITON_PTXAS"):
        assembler.assemble(axpy_ptx, "sm_80", "axpy")
    assert "fixed in 13.1" in assembler.known_problem((12, 9))
    assert "wgmma" in assembler.known_problem((13, 2))
    assert assembler.known_problem((13, 3)) == ""


def test_a_users_ptxas(axpy_ptx: str, tmp_path: Path) -> None:
    with pytest.raises(assembler.AssemblerError, match="cannot be run"):
        assembler.version(str(tmp_path / "missing"))
    script = tmp_path / "ptxas"
    script.write_text(
        "#!/bin/sh\n[ $1 = --version ] && echo 'release 13.7, V13.7.9' && exit\n"
        "for last; do :; done\nprintf cubin >$last\n"
        'echo "ptxas info : Function properties for axpy"\n'
        "echo '    8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads'\n"
        "echo 'ptxas info : Used 33 registers, used 0 barriers, 512 bytes smem'\n"
        "echo 'ptxas warning : Registers are spilled'\n"
    )
    script.chmod(0o755)
    assert assembler.version(str(script)) == "ptxas 13.7.9"
    got = assembler.assemble(axpy_ptx, "sm_80", "axpy", ptxas=str(script))
    assert got == assembler.Assembled(
        b"cubin", 33, 16, 24, 8, 512, ("ptxas warning : Registers are spilled",)
    )


WARM = """
import sys, torch, minitriton as triton, minitriton.language as tl

@triton.jit
def scale(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n) * 2.0, mask=i < n)

x = torch.ones(100)
compiled = scale[(1,)](x, 100, BLOCK=128)
assert (x == 2).all()
print(compiled.from_cache, any("_mlir" in name or name == "mlir" for name in sys.modules))
"""


def test_a_warm_hit_imports_no_mlir(tmp_path: Path) -> None:
    script = tmp_path / "warm.py"
    script.write_text(WARM)
    runs = [
        subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
        for _ in range(2)
    ]
    assert [run.stdout.strip() for run in runs] == ["False True", "True False"], runs
