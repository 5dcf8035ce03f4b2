"""Everything that happens to a kernel, in order: build, tile passes, lower, PTX, cubin.

A warm cache hit goes through none of it and imports no MLIR. The stages are data (`Stages`), so
that tests and tools can put their own in place of any of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from minitriton import fingerprint, options
from minitriton.compiled import CompiledKernel
from minitriton.dump import Dump
from minitriton.frontend.signature import Specialization
from minitriton.ir.diagnostics import InternalError, MiniTritonError, SharedMemoryExceeded
from minitriton.ir.target import ROW_SPLIT_WARPS, Target
from minitriton.runtime import assembler, cache

KEY_FORMAT = 1
Observer = Callable[[str, Any], None]  # gets a stage's name and the module (or text) after it


class Source(Protocol):
    """What the compiler needs to know of a kernel's source (frontend.source.SourceFunction)."""

    name: str

    def dependency_key(self) -> str:
        """Text that changes with the kernel's code and all it depends on."""


@dataclass(frozen=True, slots=True)
class Stages:
    """The functions that make a kernel. `options` below is the Specialization."""

    build: Callable[[Any, Specialization, Target], Any]  # source -> tile IR
    passes: Callable[[Target, Specialization], Sequence[Any]]  # the tile pipeline
    run: Callable[[Any, Sequence[Any], Observer], None]
    lower: Callable[[Any, Target, Specialization], Any]  # tile IR -> gpu.module
    emit: Callable[[Any, Target, Specialization], str]  # -> PTX
    metadata: Callable[[Any], dict[str, Any]]  # `mt.*` attributes of a module
    context: Callable[[], contextlib.AbstractContextManager[Any]]
    cacheable: bool = False  # given in place of the standard ones: may results be kept on disk?


def standard_stages(settings: options.Options | None = None, *, check: bool = False) -> Stages:
    """MiniTriton's own stages; this is what imports MLIR. `settings` says which instructions they
    may use (default: all); `check` verifies after each pass."""
    settings = options.Options() if settings is None else settings
    from minitriton.codegen.lower import CodegenOptions, lower_to_gpu
    from minitriton.codegen.ptx import emit_ptx
    from minitriton.frontend.build import build_module
    from minitriton.ir.context import use
    from minitriton.passes.pipeline import run_pipeline, tile_pipeline
    from minitriton.passes.tile_pass import PassOptions

    def lower(module: Any, target: Target, spec: Specialization) -> Any:
        fusion = bool(spec.option("enable_fp_fusion", True))
        return lower_to_gpu(module, target, CodegenOptions(enable_fp_fusion=fusion))

    def run(module: Any, passes: Sequence[Any], done: Observer) -> None:
        run_pipeline(module, passes, lambda index, name, after, seconds: done(name, after))

    chosen = PassOptions(
        check=check, wgmma=settings.wgmma, tma=settings.tma, specialize=settings.specialize,
        share_registers=assembler.shares_registers(settings.ptxas),
    )  # fmt: skip

    def for_kernel(spec: Specialization) -> PassOptions:
        overlap = spec.option("launch_pdl")
        if not settings.pdl or (overlap is None and spec.option("launch_cooperative_grid")):
            overlap = False
        found = dataclasses.replace(chosen, overlap=overlap)
        wanted = spec.option("warp_specialize")
        if wanted is None:
            return found
        allowed = chosen.specialize and bool(wanted)
        return dataclasses.replace(found, specialize=allowed, force_specialize=bool(wanted))

    return Stages(
        build=build_module,
        passes=lambda target, spec: tile_pipeline(target, for_kernel(spec)),
        run=run,
        lower=lower,
        emit=lambda lowered, target, spec: emit_ptx(lowered),
        metadata=module_metadata,
        context=use,
    )


def module_metadata(module: Any) -> dict[str, Any]:
    """The `mt.*` attributes of a module as plain Python values, without their prefix."""
    found = {}
    attributes = module.operation.attributes
    for item in attributes:
        name = item if isinstance(item, str) else item.name  # bindings differ in what they yield
        if name.startswith("mt."):
            attribute = attributes[name]
            value = getattr(attribute, "value", None)
            found[name.removeprefix("mt.")] = str(attribute) if value is None else value
    return found


@dataclass(slots=True)
class _Progress:
    """Which stage is done, for errors and timing."""

    observers: Sequence[Observer]
    stage: str = "build"
    started: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=dict)

    def done(self, name: str, module: Any) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.started
        for observer in self.observers:
            observer(name, module)
        self.stage = f"after {name}"
        self.started = time.perf_counter()


def lower_kernel(
    source: Source,
    spec: Specialization,
    target: Target,
    stages: Stages,
    observers: Sequence[Observer] = (),
) -> tuple[str, dict[str, Any]]:
    """PTX and metadata; CompileError for the user's mistakes, InternalError for ours."""
    progress = _Progress(observers)
    try:
        with stages.context():
            module = stages.build(source, spec, target)
            progress.done("build", module)
            stages.run(module, stages.passes(target, spec), progress.done)
            progress.stage = "lower"
            lowered = stages.lower(module, target, spec)
            progress.done("lower", lowered)
            metadata = stages.metadata(module) | stages.metadata(lowered)
            progress.stage = "emit_ptx"
            ptx = stages.emit(lowered, target, spec)
            progress.done("ptx", ptx)
    except (MiniTritonError, MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise InternalError(progress.stage, reason) from error
    metadata["seconds"] = {name: round(value, 6) for name, value in progress.seconds.items()}
    return ptx, metadata


def key_text(
    source: Source, spec: Specialization, target: Target, settings: options.Options
) -> str:
    """All that decides a kernel's code, as text: the key of the disk cache."""
    return "\n".join(
        (
            f"format {KEY_FORMAT}",
            f"minitriton {fingerprint.build_id()}",
            f"mlir {fingerprint.mlir_version(settings.mlir)}",
            f"assembler {_assembler_version(settings.ptxas)}",
            f"target {target.arch}",
            settings.code_key(),
            f"kernel {source.name}",
            spec.key_text(),
            source.dependency_key(),
        )
    )


def _assembler_version(ptxas: str) -> str:
    try:
        return assembler.version(ptxas)
    except assembler.AssemblerError:
        if ptxas:
            raise
        return "none"  # enough for the emulator


class _Caches:
    """The disk cache of this process, opened on first use and again when its place changes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._place: tuple[Any, ...] | None = None
        self._cache = cache.DiskCache(None)

    def get(self, settings: options.Options) -> cache.DiskCache:
        place = (settings.cache, settings.cache_dir, settings.cache_shared, settings.cache_limit_mb)
        with self._lock:
            if place != self._place:
                self._place = place
                self._cache = cache.DiskCache(None)
                if settings.cache:
                    self._cache = cache.open_cache(
                        settings.cache_dir,
                        shared=settings.cache_shared,
                        limit_bytes=settings.cache_limit_mb << 20,
                    )
            return self._cache


_CACHES = _Caches()


def disk_cache(settings: options.Options | None = None) -> cache.DiskCache:
    """The disk cache that the environment asks for."""
    return _CACHES.get(options.read() if settings is None else settings)


def compile_kernel(
    source: Source,
    spec: Specialization,
    target: Target,
    *,
    cubin: bool = False,
    stages: Stages | None = None,
    settings: options.Options | None = None,
) -> CompiledKernel:
    """The compiled form of a kernel: from the disk cache, or made now and published there.

    `cubin` says that the binary will be needed at once; else it is assembled on demand. Other
    `stages` than the standard ones stay out of the disk cache, as no key tells them apart.
    """
    settings = options.read() if settings is None else settings
    standard = stages is None or stages.cacheable
    optional = spec.num_warps != ROW_SPLIT_WARPS  # may the kernel do without a producer warp?
    store = disk_cache(settings) if standard else cache.DiskCache(None)
    key = key_text(source, spec, target, settings)
    compiled = dump = None
    if not settings.dump and (entry := store.get(key)) is not None and "ptx" in entry.blobs:
        binary = entry.blobs.get("cubin")
        compiled = CompiledKernel(
            source, spec, target, entry.blobs["ptx"].decode(), entry.meta, binary, from_cache=True
        )
    if compiled is None:
        dump = Dump.open(settings.dump, source.name, cache.digest(key)) if settings.dump else None
        observers: list[Observer] = [dump.stage] if dump else []
        chosen = stages or standard_stages(settings, check=settings.check_passes)
        try:
            ptx, metadata = lower_kernel(source, spec, target, chosen, observers)
        except SharedMemoryExceeded:  # the slots of a producer warp live as long as the kernel
            if not (standard and settings.specialize and optional):
                raise
            plain = dataclasses.replace(settings, specialize=False)
            return _instead(source, spec, target, plain, cubin, store, key)
        compiled = CompiledKernel(source, spec, target, ptx, metadata, None)
    compiled.attach(
        settings=settings,
        publish=lambda done: store.put(key, done.entry()),
        restage=lambda: stage_texts(source, spec, target, stages or standard_stages(settings)),
    )
    if cubin:
        compiled.assemble()
        simpler = _simpler(compiled, settings) if standard and optional else None
        if simpler is not None:
            compiled = _instead(source, spec, target, simpler, cubin, store, key)
    elif not compiled.from_cache:
        store.put(key, compiled.entry())
    if dump is not None:
        dump.finish(compiled)
    return compiled


def _simpler(compiled: CompiledKernel, settings: options.Options) -> options.Options | None:
    """Settings for a kernel in which ptxas waits for each wgmma: they are no use then."""
    if compiled.serialized and settings.specialize:
        return dataclasses.replace(settings, specialize=False)
    if compiled.waits_for_calls and settings.wgmma:
        return dataclasses.replace(settings, wgmma=False)
    return None


def _instead(
    source: Source, spec: Specialization, target: Target, settings: options.Options, cubin: bool,
    store: cache.DiskCache, key: str,
) -> CompiledKernel:  # fmt: skip
    """The kernel with other settings, also published where what was asked for would be."""
    compiled = compile_kernel(source, spec, target, cubin=cubin, settings=settings)
    store.put(key, compiled.entry())
    return compiled


def stage_texts(
    source: Source, spec: Specialization, target: Target, stages: Stages
) -> dict[str, str]:
    """The text after every stage and pass, in order: the kernel is compiled again for it."""
    texts: dict[str, str] = {}
    lower_kernel(
        source, spec, target, stages, [lambda name, module: texts.update({name: str(module)})]
    )
    return texts
