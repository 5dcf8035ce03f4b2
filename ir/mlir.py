"""The one place that knows where the MLIR Python bindings live.

    from minitriton.ir.mlir import ir, passmanager

`MINITRITON_MLIR` names another provider package; else a genuine `mlir` distribution is taken, else
the copy inside `numba_cuda_mlir`. The choice is made once per process: two LLVMs must never meet.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import types
from typing import TYPE_CHECKING, Any

_NUMBA = "numba_cuda_mlir"
_keep_alive: list[ctypes.CDLL] = []


def _find(package: str) -> Any:
    try:
        return importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None


def _stub_numba_parent() -> bool:
    """Make `numba_cuda_mlir._mlir` importable without running the parent's slow `__init__`.

    The parent would preload LLVM with RTLD_DEEPBIND so that it does not clash with the LLVMs of
    torch and Triton in the same process; the stub has to repeat that.
    """
    if _NUMBA in sys.modules:
        return True
    spec = _find(_NUMBA)
    if spec is None or not spec.submodule_search_locations:
        return False
    root = next(iter(spec.submodule_search_locations))
    mode = os.RTLD_NOW | os.RTLD_LOCAL | getattr(os, "RTLD_DEEPBIND", 0)
    for name in ("libMLIRPythonCAPI.so", f"libMLIRPythonSupport-{_NUMBA}.so"):
        path = os.path.join(root, "_mlir", "_mlir_libs", name)
        if os.path.exists(path):
            _keep_alive.append(ctypes.CDLL(path, mode=mode))
    stub = types.ModuleType(_NUMBA)
    stub.__path__ = [root]
    stub.__spec__ = spec
    stub.__file__ = spec.origin
    sys.modules[_NUMBA] = stub
    return True


def _choose() -> str:
    wanted = os.environ.get("MINITRITON_MLIR")
    for package in [wanted] if wanted else ["mlir", f"{_NUMBA}._mlir"]:
        if package.startswith(_NUMBA):
            if _stub_numba_parent():
                return package
        elif _find(package + "._mlir_libs") is not None:  # PyPI's `mlir` is only a placeholder
            return package
    raise ImportError(
        "no MLIR Python bindings found; install them with: pip install numba-cuda-mlir"
    )


PROVIDER = _choose()
if TYPE_CHECKING:  # type checkers see one provider
    from numba_cuda_mlir._mlir import ir, passmanager
    from numba_cuda_mlir._mlir.dialects import ext
else:
    ir = importlib.import_module(PROVIDER + ".ir")
    passmanager = importlib.import_module(PROVIDER + ".passmanager")
    ext = importlib.import_module(PROVIDER + ".dialects.ext")
for _name in ("arith", "func", "gpu", "llvm", "math", "nvvm", "scf", "vector"):
    importlib.import_module(f"{PROVIDER}.dialects.{_name}")  # else each op object costs 40 us


def _set_llvm_option(option: str) -> None:
    """Sets a command-line option of the provider's LLVM, if that exports the way to it."""
    folder = os.path.dirname(importlib.import_module(PROVIDER + "._mlir_libs").__file__ or "")
    path = os.path.join(folder, "libMLIRPythonCAPI.so")
    if os.path.exists(path) and hasattr(
        library := ctypes.CDLL(path), "LLVMParseCommandLineOptions"
    ):
        arguments = (ctypes.c_char_p * 2)(b"minitriton", option.encode())
        library.LLVMParseCommandLineOptions(2, arguments, None)


# Registers come in pairs where that helps; the search for more took half of LLVM's time. Only an
# option of the process leaves the vectorising of loads and stores on, which is wanted.
_set_llvm_option("-vectorize-slp=false")


def dialect_search_prefix() -> str:
    """Dotted prefix under which the bindings look for a dialect's Python module."""
    return PROVIDER + ".dialects"


def provider_version() -> str:
    """Name and version of the distribution that provides MLIR: part of the cache key."""
    distribution = PROVIDER.split(".")[0].replace("_", "-")
    try:
        return f"{distribution} {importlib.metadata.version(distribution)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{distribution} (unknown version)"
