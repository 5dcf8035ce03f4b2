"""What `kernel[grid](...)` works on: the base of kernels, autotuned ones and those with heuristics.

Libraries wrap kernels in classes of their own, which define `run`, and ask `isinstance`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")  # of the function that is launched; Triton's annotations name it


class KernelInterface(Generic[T]):
    """Something to launch over a grid; subclasses define `run`."""

    def run(self, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> Any:
        """Launch over `grid`, or with `warmup` only compile."""
        raise TypeError(f"{type(self).__name__} does not say how to run")

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        """A function that launches over `grid`."""
        return lambda *args, **kwargs: self.run(*args, grid=grid, **kwargs)

    def warmup(self, *args: Any, grid: Any = None, **kwargs: Any) -> Any:
        """Compile without launching."""
        return self.run(*args, grid=grid, warmup=True, **kwargs)
