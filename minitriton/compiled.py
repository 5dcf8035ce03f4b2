"""A compiled kernel: its PTX, what it needs from a GPU, and every stage's text on request."""

from __future__ import annotations

import dataclasses
import functools
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from minitriton import options, refused_asm
from minitriton.frontend.signature import Specialization
from minitriton.ir.target import Target
from minitriton.runtime import assembler, cache
from minitriton.runtime.driver import OutOfResources
from minitriton.runtime.launch import POINTER, LaunchShape
from minitriton.runtime.module import Function

WARP = 32
SERIALIZED = "wgmma.mma_async instructions are serialized"  # in ptxas' remarks
BESIDE_CALLS = "(C7509)"  # that remark where the reason is a call
_LATE_STAGES = frozenset({"lower", "ptx"})
_MOST_LOADED = 256  # kernels in the emulator at a time: a large one takes 5 MB


class Metadata(dict[str, Any]):
    """What the compiler found out, by key; as attributes what Triton has under those names."""

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        return int(self.get("shared_bytes", 0))


class CompiledKernel:
    """One kernel for one specialisation and target.

    `metadata` holds what the compiler found out (`shared_bytes`, `seconds` per stage, ...). The
    cubin is assembled when it is first needed. `compiled[grid](*args)` launches it with the
    kernel's parameters in order.
    """

    def __init__(
        self,
        source: Any,
        spec: Specialization,
        target: Target,
        ptx: str,
        metadata: dict[str, Any],
        cubin: bytes | None,
        *,
        from_cache: bool = False,
    ) -> None:
        self.source, self.spec, self.target = source, spec, target
        self.ptx, self.metadata, self.from_cache = ptx, Metadata(metadata), from_cache
        self.name: str = source.name
        self._cubin = cubin
        self._lock = threading.RLock()
        self._settings = options.Options()
        self._publish: Callable[[CompiledKernel], object] = _nowhere
        self._restage: Callable[[], dict[str, str]] = dict
        self._texts: dict[str, str] | None = None
        self._forms: dict[str, CompiledKernel] = {}  # others of this kernel, by name
        self.report: Any = None  # counters of the last launch in the emulator
        self.asm: Mapping[str, Any] = Stagewise(self)
        self.functions: dict[int, Function] = {}  # as loaded on each GPU
        # for launches with every check, by GPU and whether they wait
        self.launchers: dict[tuple[int, bool], Callable[..., None]] = {}

    def attach(
        self,
        *,
        settings: options.Options,
        publish: Callable[[CompiledKernel], object],
        restage: Callable[[], dict[str, str]],
    ) -> None:
        """Settings for assembling, where to publish, and how to get the stages' texts again."""
        self._settings, self._publish, self._restage = settings, publish, restage

    def __repr__(self) -> str:
        return f"<CompiledKernel {self.name} for {self.target.arch}, {self.num_warps} warps>"

    @property
    def num_warps(self) -> int:
        """Warps of a CTA as launched, producers of a specialised kernel included."""
        own = int(self.metadata.get("num_warps", self.spec.num_warps))
        own *= int(self.metadata.get("consumer_groups", 1))
        return own + int(self.metadata.get("producer_warps", 0))

    @property
    def shared(self) -> int:
        """Dynamic shared memory of a CTA in bytes."""
        return self.metadata.shared

    def _init_handles(self) -> None:
        """Triton's step before `n_regs` may be read; here nothing has to be called for that."""

    @property
    def n_regs(self) -> int:
        """Registers per thread."""
        self.assemble()
        return int(self.metadata["registers"])

    @property
    def n_spills(self) -> int:
        """Bytes stored by register spills per thread."""
        self.assemble()
        return int(self.metadata["spill_stores"])

    @property
    def serialized(self) -> bool:
        """Whether a producer warp left the others too few registers: ptxas waits for each wgmma."""
        warnings = self.metadata.get("warnings", ())
        return "producer_warps" in self.metadata and any(SERIALIZED in text for text in warnings)

    @property
    def waits_for_calls(self) -> bool:
        """Whether ptxas waits for each wgmma because something else is a call."""
        return any(BESIDE_CALLS in text for text in self.metadata.get("warnings", ()))

    @property
    def shape(self) -> LaunchShape:
        """CTA size and launch attributes."""
        return LaunchShape(
            threads=WARP * self.num_warps,
            shared=self.shared,
            clusters=int(self.metadata.get("num_ctas", self.spec.num_ctas)),
            cooperative=bool(self.spec.option("launch_cooperative_grid", False)),
            programmatic=bool(self.metadata.get("programmatic", False)),
        )

    def parameter_dtypes(self) -> list[str]:
        """Types of the compiled function's parameters: scalar names, or POINTER."""
        return [POINTER if p.kind == "pointer" else p.dtype for p in self.spec.runtime_params()]

    @property
    def persistent(self) -> bool:
        """Whether a CTA runs several programs; the grid's sizes are passed after the parameters."""
        return bool(self.metadata.get("persistent", False))

    @functools.cached_property
    def tensor_maps(self) -> list[dict[str, Any]]:
        """Descriptions of the tensor maps that are passed after the parameters."""
        return list(json.loads(self.metadata.get("tensor_maps", "[]")))

    def without_tma(self) -> CompiledKernel:
        """The same kernel copying without TMA, for launches that no tensor map can describe."""
        return self._form("without TMA", self.spec, dataclasses.replace(self._settings, tma=False))

    def without_clusters(self) -> CompiledKernel:
        """The same kernel with num_ctas=1, for launches whose programs do not fill clusters."""
        spec = dataclasses.replace(self.spec, num_ctas=1)
        return self._form("without clusters", spec, self._settings)

    def _form(self, name: str, spec: Specialization, settings: options.Options) -> CompiledKernel:
        """The kernel compiled otherwise, once."""
        from minitriton.compiler import compile_kernel

        with self._lock:
            if name not in self._forms:
                self._forms[name] = compile_kernel(
                    self.source, spec, self.target, settings=settings
                )
            return self._forms[name]

    def check_resources(self) -> None:
        """OutOfResources if the target cannot run this kernel, whatever its grid."""
        if self.shared > self.target.max_shared_bytes:
            limit = self.target.max_shared_bytes
            raise OutOfResources(self.shared, limit, "shared memory (bytes)")

    def assemble(self) -> bytes:
        """The cubin, made from the PTX if there is none yet."""
        with self._lock:
            if self._cubin is None:
                self.check_resources()
                ptxas = self._settings.ptxas
                try:
                    done = assembler.assemble(self.ptx, self.target.arch, self.name, ptxas=ptxas)
                except assembler.AssemblerError as error:
                    raise refused_asm.explained(error, self.ptx) or error from error
                self._cubin = done.cubin
                self.metadata |= {
                    "registers": done.registers,
                    "spill_stores": done.spill_stores,
                    "spill_loads": done.spill_loads,
                    "stack": done.stack,
                    "static_shared": done.static_shared,
                    "warnings": list(done.warnings),
                }
                self._publish(self)
            return self._cubin

    def entry(self) -> cache.Entry:
        """What the disk cache keeps of this kernel."""
        blobs = {"ptx": self.ptx.encode()}
        if self._cubin is not None:
            blobs["cubin"] = self._cubin
        return cache.Entry(self.metadata, blobs)

    def texts(self) -> dict[str, str]:
        """Text by stage and pass, in order; compiles the kernel anew the first time."""
        with self._lock:
            if self._texts is None:
                self._texts = self._restage()
            return self._texts

    def tile_texts(self) -> dict[str, str]:
        """Of `texts`, those in tile IR: from the frontend's module to what is lowered."""
        return {name: text for name, text in self.texts().items() if name not in _LATE_STAGES}

    def emulator(self) -> Any:
        """The parsed form of the PTX, for launches on the CPU."""
        return _loaded(self.ptx)

    def __getitem__(self, grid: Any) -> Callable[..., CompiledKernel]:
        from minitriton.execute import launch_compiled

        def launch(*arguments: Any) -> CompiledKernel:
            launch_compiled(self, grid, arguments)
            return self

        return launch


class Stagewise(Mapping[str, Any]):
    """`.asm`: "source", each stage and pass, "ptx", "cubin" (bytes) and "sass", made when read."""

    def __init__(self, compiled: CompiledKernel) -> None:
        self._compiled = compiled

    def __getitem__(self, stage: str) -> Any:
        compiled = self._compiled
        match stage:
            case "ptx":
                return compiled.ptx
            case "cubin":
                return compiled.assemble()
            case "sass":
                return assembler.disassemble(compiled.assemble())
            case "source":
                return getattr(compiled.source, "text", "")
            case "tile":
                return self._last_tile_stage()
        texts = compiled.texts()
        if stage not in texts:
            raise KeyError(f"no stage {stage!r}; there are: {', '.join(self)}")
        return texts[stage]

    def _last_tile_stage(self) -> str:
        return next(reversed(self._compiled.tile_texts().values()), "")

    def __iter__(self) -> Iterator[str]:
        stages = [name for name in self._compiled.texts() if name != "ptx"]
        return iter(["source", *stages, "tile", "ptx", "cubin", "sass"])

    def __len__(self) -> int:
        return sum(1 for _ in self)


@functools.lru_cache(_MOST_LOADED)
def _loaded(ptx: str) -> Any:
    from minitriton.runtime.emulator import Emulator

    return Emulator(ptx)


def _nowhere(_: CompiledKernel) -> None:
    """Publish nothing: for kernels made without a cache."""
