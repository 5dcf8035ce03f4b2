"""MINITRITON_DUMP=DIR: every stage of a compilation as a numbered file, and an index with timings.

Each kernel gets DIR/<kernel>-<key>/ with 00-build.mlir, 01-<pass>.mlir, ... NN-kernel.ptx, .cubin,
.sass and index.txt; a stage that changed nothing is named in the index and not written again.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minitriton.runtime.assembler import AssemblerError
from minitriton.runtime.driver import OutOfResources

if TYPE_CHECKING:
    from minitriton.compiled import CompiledKernel


@dataclass
class Dump:
    """The files of one compilation; `stage` is an observer of the compiler."""

    folder: Path
    number: int = 0
    last: str = ""
    rows: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    @staticmethod
    def open(directory: str, kernel: str, key: str) -> Dump:
        """A fresh folder for `kernel` below `directory`."""
        name = re.sub(r"[^\w.-]", "_", kernel)[:80]
        folder = Path(directory).expanduser() / f"{name}-{key[:8]}"
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("[0-9][0-9]-*"):
            old.unlink()
        return Dump(folder)

    def stage(self, name: str, module: Any) -> None:
        """Write the text after stage `name`; the index follows at once, so a crash leaves it."""
        seconds = time.perf_counter() - self.started
        text = str(module)
        if text == self.last:
            self._row(name, "unchanged", seconds)
        else:
            kind = (
                "kernel.ptx" if name == "ptx" else f"{re.sub(r'[^-.0-9A-Za-z_]', '_', name)}.mlir"
            )
            self._write(name, kind, text.encode(), seconds)
        self.last = text
        self.started = time.perf_counter()

    def finish(self, compiled: CompiledKernel) -> None:
        """Add the cubin and, where nvdisasm is installed, the SASS."""
        for name in ("cubin", "sass"):
            begun = time.perf_counter()
            try:
                made = compiled.asm[name]
            except (AssemblerError, OutOfResources) as error:
                self._row(name, f"not made: {str(error).splitlines()[0]}", 0.0)
                return
            data = made.encode() if isinstance(made, str) else made
            self._write(name, f"kernel.{name}", data, time.perf_counter() - begun)

    def _write(self, stage: str, name: str, data: bytes, seconds: float) -> None:
        file = f"{self.number:02d}-{name}"
        (self.folder / file).write_bytes(data)
        self.number += 1
        self._row(stage, file, seconds)

    def _row(self, stage: str, what: str, seconds: float) -> None:
        self.rows.append(f"{seconds * 1e3:10.3f} ms  {stage:<28} {what}")
        (self.folder / "index.txt").write_text("\n".join(self.rows) + "\n")
