"""`set_allocator`: there for programs that were written for Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

allocators: list[Callable[[int, int, int | None], Any]] = []  # the one that was set last


def set_allocator(allocator: Callable[[int, int, int | None], Any]) -> None:
    """Keep `allocator(size, alignment, stream)`; nothing ever calls it.

    Triton takes memory for the TMA descriptors that a kernel makes from it. Here descriptors made
    in a kernel are pointers, shapes and strides in registers, which need none.
    """
    if not callable(allocator):
        raise TypeError(f"set_allocator takes a function, not {type(allocator).__name__}")
    allocators[:] = [allocator]
