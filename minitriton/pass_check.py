"""Per-pass checking: the tile IR after every pass must compute what it did before.

With MINITRITON_CHECK_PASSES=1 a launch on host arrays is preceded by a run of every tile stage in
the tile interpreter, each on its own copy of the arrays; the first stage whose result differs from
that of the frontend's module is named in an InternalError.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minitriton.ir.diagnostics import InternalError

# of the largest element, as sums may be reordered; other types must agree exactly
RELATIVE_TOLERANCE = {"fp64": 1e-6, "fp32": 1e-3, "fp16": 2e-2, "bf16": 5e-2,
                      "fp8e4nv": 2e-1, "fp8e5": 3e-1}  # fmt: skip


class HostCopy:
    """Copies of pieces of host memory, readable and writable by their original addresses."""

    def __init__(self, pieces: Sequence[Any]) -> None:
        self.starts = np.array([p.address for p in pieces], np.int64)
        self.data = [
            np.frombuffer(ctypes.string_at(p.address, p.nbytes), np.uint8).copy() for p in pieces
        ]

    def _places(self, addresses: np.ndarray, itemsize: int) -> tuple[np.ndarray, np.ndarray]:
        addresses = np.asarray(addresses, np.int64).ravel()
        piece = np.searchsorted(self.starts, addresses, "right") - 1
        offset = addresses - self.starts[piece]
        sizes = np.array([len(d) for d in self.data])
        if (piece < 0).any() or (offset + itemsize > sizes[piece]).any():
            raise InternalError("interpret", "access outside of the arguments' memory")
        return piece, offset

    def end(self, address: int) -> int:
        """See ir.interpret.Memory."""
        piece = int(np.searchsorted(self.starts, address, "right")) - 1
        return int(self.starts[piece]) + len(self.data[piece])

    def read(self, addresses: np.ndarray, itemsize: int) -> np.ndarray:
        """See ir.interpret.Memory."""
        piece, offset = self._places(addresses, itemsize)
        raw = np.empty((len(piece), itemsize), np.uint8)
        for i, data in enumerate(self.data):
            mine = piece == i
            raw[mine] = data[offset[mine][:, None] + np.arange(itemsize)]
        return raw.view(f"u{itemsize}").ravel()

    def write(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """See ir.interpret.Memory."""
        values = np.ascontiguousarray(values).ravel()
        piece, offset = self._places(addresses, values.itemsize)
        raw = values.view(np.uint8).reshape(len(values), values.itemsize)
        for i, data in enumerate(self.data):
            mine = piece == i
            data[offset[mine][:, None] + np.arange(values.itemsize)] = raw[mine]


def check_stages(
    name: str,
    stages: Mapping[str, str],
    pieces: Sequence[Any],
    dtypes: Sequence[str],
    arguments: Sequence[Any],
    grid: tuple[int, int, int],
) -> None:
    """Runs each tile stage's text, in order; the first one's result is what the others must have.

    `dtypes[i]` is the element type ("fp16", ...) of piece i, "" for bytes that must agree exactly.
    InternalError names kernel `name` and the first stage whose result differs. Kernels with inline
    PTX that is not pure are not checked: what it does to memory, the interpreter cannot see.
    """
    if any("mt.effectful_asm" in text for text in stages.values()):
        return
    from minitriton.ir.context import use
    from minitriton.ir.interpret import interpret
    from minitriton.ir.mlir import ir
    from minitriton.run_asm import run_asm

    expected: list[np.ndarray] | None = None
    with use():
        for stage, text in stages.items():
            memory = HostCopy(pieces)
            interpret(ir.Module.parse(text), memory, arguments, grid, run_asm)
            if expected is None:
                expected = memory.data
                continue
            for i, (now, before) in enumerate(zip(memory.data, expected, strict=True)):
                if not _agree(now, before, dtypes[i]):
                    raise InternalError(
                        stage, f"the pass changed what '{name}' writes to '{pieces[i].name}'"
                    )


def _agree(now: np.ndarray, before: np.ndarray, dtype: str) -> bool:
    if np.array_equal(now, before):
        return True
    if dtype not in RELATIVE_TOLERANCE:
        return False
    a, b = (_decode(x, dtype) for x in (now, before))
    finite = np.isfinite(b)
    if not np.array_equal(np.isfinite(a), finite):
        return False
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return False
    scale = np.abs(b[finite]).max(initial=1e-6)
    return bool((np.abs(a[finite] - b[finite]) <= RELATIVE_TOLERANCE[dtype] * scale).all())


def _decode(data: np.ndarray, dtype: str) -> np.ndarray:
    """Bytes of whole elements, wherever the allocation ends, as float64."""
    from minitriton.ir.dtypes import BY_NAME
    from minitriton.ir.interpret_ops import from_bits, item_bytes
    from minitriton.ir.types import to_mlir

    element = to_mlir(BY_NAME[dtype])
    size = item_bytes(element)
    raw = data[: len(data) // size * size].view(f"u{size}")
    return from_bits(raw, element).astype(np.float64)
