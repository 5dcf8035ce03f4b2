"""What besides the kernel decides its code: our own sources, MLIR's version, the assembler's.

All of it goes into the key of the disk cache, and none of it imports MLIR or loads a library.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

_ROOMS = ("", "frontend", "ir", "passes", "codegen", "runtime")  # "" is ourselves


def sources() -> list[Path]:
    """Our files that can change generated code; of the language's own functions all."""
    package = Path(__file__).parent
    rooms = (path for room in _ROOMS for path in sorted((package / room).glob("*.py")))
    return [*rooms, *sorted((package / "language").rglob("*.py"))]


@functools.cache
def build_id() -> str:
    """Digest of our sources that can change generated code, wherever they are installed."""
    package = Path(__file__).parent
    found = hashlib.sha256()
    for path in sources():
        data = path.read_bytes()
        found.update(f"{path.relative_to(package)} {len(data)}\n".encode())
        found.update(data)
    return found.hexdigest()[:32]


@functools.cache
def mlir_version(wanted: str = "") -> str:
    """Name and version of the distribution with MLIR's bindings; `wanted` as in Options.mlir."""
    from importlib import metadata  # takes 20 ms to import

    for name in [wanted.split(".")[0]] if wanted else ["mlir", "numba-cuda-mlir"]:
        if name == "mlir" and not _is_genuine(name):
            continue
        try:
            return f"{name} {metadata.version(name.replace('_', '-'))}"
        except metadata.PackageNotFoundError:
            continue
    return f"{wanted or 'mlir'} (unknown version)"


def _is_genuine(package: str) -> bool:
    """Whether the bindings are there: PyPI's `mlir` is only a placeholder."""
    import importlib.util

    try:
        return importlib.util.find_spec(package + "._mlir_libs") is not None
    except (ImportError, ValueError):
        return False
