"""MiniTriton: Triton kernels compiled in pure Python, run on a GPU or in an emulator of one.

    import minitriton as triton
    import minitriton.language as tl

Names are loaded when first used: importing the package costs a few milliseconds and brings in
neither NumPy nor MLIR, CUDA or torch.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minitriton.autotune import Config, autotune, heuristics
    from minitriton.compiled import CompiledKernel
    from minitriton.errors import CompilationError, TritonError
    from minitriton.frontend.source import constexpr_function
    from minitriton.ir.diagnostics import CompileError, InternalError, MiniTritonError
    from minitriton.jit import JITFunction, Kernel, jit, reload_switches
    from minitriton.kernel_interface import KernelInterface
    from minitriton.runtime.arguments import TensorWrapper, reinterpret
    from minitriton.runtime.driver import CudaError, DeviceLostError, OutOfResources
    from minitriton.sizes import cdiv, next_power_of_2
    from minitriton.workspace import set_allocator

__version__ = "0.1.0"

# public name -> module that defines it
_HOMES = {
    "Config": "minitriton.autotune",
    "autotune": "minitriton.autotune",
    "heuristics": "minitriton.autotune",
    "CompiledKernel": "minitriton.compiled",
    "CompileError": "minitriton.ir.diagnostics",
    "InternalError": "minitriton.ir.diagnostics",
    "MiniTritonError": "minitriton.ir.diagnostics",
    "CompilationError": "minitriton.errors",
    "TritonError": "minitriton.errors",
    "JITFunction": "minitriton.jit",
    "Kernel": "minitriton.jit",
    "KernelInterface": "minitriton.kernel_interface",
    "jit": "minitriton.jit",
    "TensorWrapper": "minitriton.runtime.arguments",
    "CudaError": "minitriton.runtime.driver",
    "DeviceLostError": "minitriton.runtime.driver",
    "OutOfResources": "minitriton.runtime.driver",
    "cdiv": "minitriton.sizes",
    "constexpr_function": "minitriton.frontend.source",
    "next_power_of_2": "minitriton.sizes",
    "reinterpret": "minitriton.runtime.arguments",
    "reload_switches": "minitriton.jit",
    "set_allocator": "minitriton.workspace",
}
_MODULES = ("errors", "kernels", "knobs", "language", "runtime", "testing", "tools")

__all__ = [
    "CompilationError",
    "CompileError",
    "CompiledKernel",
    "Config",
    "CudaError",
    "DeviceLostError",
    "InternalError",
    "JITFunction",
    "Kernel",
    "KernelInterface",
    "MiniTritonError",
    "OutOfResources",
    "TensorWrapper",
    "TritonError",
    "autotune",
    "cdiv",
    "constexpr_function",
    "heuristics",
    "jit",
    "next_power_of_2",
    "reinterpret",
    "reload_switches",
    "set_allocator",
]


class _Package(types.ModuleType):
    """Keeps `minitriton.jit` the decorator when the module of the same name gets imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOMES and isinstance(value, types.ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"minitriton.{name}")
    else:
        raise AttributeError(f"module 'minitriton' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, "__version__"])
