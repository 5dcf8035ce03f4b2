"""Fixtures: a private cache folder, and a pipeline that needs no MLIR."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from minitriton.compiler import Stages


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test has its own empty kernel cache."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("MINITRITON_CACHE_DIR", str(folder))
    return folder


class FakeSource:
    """Stands for frontend.source.SourceFunction; `text` is the whole key."""

    def __init__(self, name: str, text: str = "v1") -> None:
        self.name, self.text = name, text

    def dependency_key(self) -> str:
        return self.text


class Pipeline:
    """Stages that turn a source's name into `ptx`, and count how often they ran."""

    def __init__(self, ptx: str, metadata: dict[str, Any] | None = None) -> None:
        self.ptx, self.metadata, self.builds = ptx, metadata or {}, 0

    def stages(self) -> Stages:
        def build(source: Any, spec: Any, target: Any) -> str:
            self.builds += 1
            return f"tile of {source.name} for {target.arch}"

        def run(module: Any, passes: Any, done: Any) -> None:
            for name in passes:
                module = module if name == "nothing" else f"{module} after {name}"
                done(name, module)

        return Stages(
            build=build,
            passes=lambda target, spec: ["simplify", "nothing", "nothing"],
            run=run,
            lower=lambda module, target, spec: f"lowered {module}",
            emit=lambda module, target, spec: self.ptx,
            metadata=lambda module: dict(self.metadata),
            context=contextlib.nullcontext,
            cacheable=True,
        )


@pytest.fixture
def axpy_ptx() -> str:
    """y += a * x for fp32 arrays of n elements, one per thread."""
    return (Path(__file__).parent / "axpy.ptx").read_text()


@pytest.fixture
def pipeline(axpy_ptx: str) -> Pipeline:
    """A pipeline that always ends in axpy."""
    return Pipeline(axpy_ptx)


@pytest.fixture
def fake_source() -> type[FakeSource]:
    """The class of sources that need no frontend."""
    return FakeSource
