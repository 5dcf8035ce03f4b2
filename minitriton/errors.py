"""MiniTriton's errors under Triton's names, for code that catches those."""

from __future__ import annotations

from minitriton.ir.diagnostics import CompileError as CompilationError
from minitriton.ir.diagnostics import MiniTritonError as TritonError
from minitriton.runtime.driver import OutOfResources

__all__ = ["CompilationError", "OutOfResources", "TritonError"]
