"""`python -m minitriton doctor`: versions and paths of native pieces, GPUs, cache, known faults.

Each line is a `Finding`; nothing here raises, what is missing becomes a finding with its remedy.
"""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from minitriton import compiler, fingerprint, options
from minitriton.runtime import assembler, driver

State = Literal["ok", "note", "bad"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    topic: str
    state: State
    text: str


def examine(settings: options.Options | None = None) -> list[Finding]:
    """Look at everything; "bad" findings keep kernels from compiling or running rightly."""
    settings = options.read() if settings is None else settings
    found = [Finding("python", "ok", f"{platform.python_version()} on {platform.platform()}")]
    for look in _LOOKS:
        try:
            found += look(settings)
        except Exception as error:  # a report must never fail on what it reports
            found.append(
                Finding(look.__name__.strip("_"), "bad", f"{type(error).__name__}: {error}")
            )
    return found


def _packages(_: options.Options) -> Iterator[Finding]:
    for name in ("minitriton", "numpy", "cuda-bindings", "cuda-core", "nvidia-nvjitlink",
                 "nvidia-cuda-nvcc", "lark"):  # fmt: skip
        try:
            yield Finding(name, "ok", metadata.version(name))
        except metadata.PackageNotFoundError:
            missing: State = "note" if name == "minitriton" else "bad"
            remedy = "run from a checkout" if name == "minitriton" else f"pip install {name}"
            yield Finding(name, missing, f"not installed ({remedy})")
    torch = importlib.util.find_spec("torch")
    text = metadata.version("torch") if torch else "not installed (optional)"
    yield Finding("torch", "ok" if torch else "note", text)


def _mlir(settings: options.Options) -> Iterator[Finding]:
    yield Finding("mlir", "ok", fingerprint.mlir_version(settings.mlir))
    from minitriton.ir import mlir

    yield Finding("mlir bindings", "ok", f"{mlir.PROVIDER} at {mlir.ir.__file__}")


def _assembler(settings: options.Options) -> Iterator[Finding]:
    if settings.ptxas:
        text = assembler.version(settings.ptxas)
        yield _judged(text.split()[-1], f"{text} at {settings.ptxas} (MINITRITON_PTXAS)")
    elif bundled := assembler.bundled_ptxas():
        yield _judged(assembler.version(bundled).split()[-1], f"{bundled} (bundled)")
    try:
        release = assembler.loaded_version()
    except assembler.AssemblerError as error:
        yield Finding("nvjitlink", "note" if settings.ptxas else "bad", str(error))
        return
    problem = assembler.known_problem(release)
    text = f"{release[0]}.{release[1]} at {_library_path()}"
    state: State = "bad" if release < assembler.MINIMUM and not settings.ptxas else "ok"
    yield Finding("nvjitlink", state, text + (f": {problem}" if problem else ""))


def _judged(version: str, text: str) -> Finding:
    parts = [int(part) for part in version.split(".")[:2]]
    problem = assembler.known_problem((parts[0], parts[1]))
    return Finding("ptxas", "bad" if problem else "ok", text + (f": {problem}" if problem else ""))


def _library_path() -> str:
    try:
        from cuda import pathfinder

        return str(pathfinder.load_nvidia_dynamic_lib("nvJitLink").abs_path)
    except Exception:  # the path is a courtesy
        return "unknown path"


def _nvdisasm(_: options.Options) -> Iterator[Finding]:
    path = assembler.find_tool("nvdisasm")
    yield Finding(
        "nvdisasm", "ok" if path else "note", path or "missing; pip install minitriton[sass]"
    )


def _gpus(settings: options.Options) -> Iterator[Finding]:
    try:
        count = driver.device_count()
    except driver.CudaError as error:
        text = str(error).splitlines()[0]
        yield Finding("driver", "note", f"{text}; kernels run in the emulator as {settings.target}")
        return
    major, minor = driver.driver_version()
    yield Finding("driver", "ok", f"supports CUDA {major}.{minor}")
    for index in range(count):
        gpu = driver.properties(index)
        capability = f"{gpu.capability[0]}.{gpu.capability[1]}"
        text = (
            f"{gpu.name}, compute {capability}, {gpu.multiprocessors} SMs, {gpu.memory >> 30} GiB"
        )
        yield Finding(f"gpu {index}", "ok", text)


def _cache(settings: options.Options) -> Iterator[Finding]:
    store = compiler.disk_cache(settings)
    if store.root is None:
        yield Finding("cache", "note", "kept in memory only")
        return
    sizes = [path.stat().st_size for path in store.entries()]
    good, bad = store.verify()
    text = f"{store.root}: {len(sizes)} entries, {sum(sizes) / 1e6:.1f} MB"
    broken = f", {len(bad)} broken (python -m minitriton cache clear)" if bad else ""
    yield Finding("cache", "note" if bad else "ok", f"{text}, {good} verified{broken}")


def _environment(_: options.Options) -> Iterator[Finding]:
    for name, value in sorted(os.environ.items()):
        if name.startswith("MINITRITON_"):
            yield Finding(name, "note", value)


_LOOKS: tuple[Callable[[options.Options], Iterator[Finding]], ...] = (
    _packages,
    _mlir,
    _assembler,
    _nvdisasm,
    _gpus,
    _cache,
    _environment,
)
