"""Which compilation the language's functions write into: set by `build`, asked by `lang_*`.

One thread compiles at a time (`ir.context.use` holds a lock), so this is one variable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from minitriton.frontend.errors_semantic import OutsideKernel

if TYPE_CHECKING:
    from minitriton.frontend.emitter import Emitter

_stack: list[Emitter] = []
F = TypeVar("F", bound=Callable[..., object])


def emitter() -> Emitter:
    """The compilation in progress; an error outside one."""
    if not _stack:
        raise OutsideKernelError()
    return _stack[-1]


class OutsideKernelError(RuntimeError):
    """A function of the language was called from host code."""

    def __init__(self) -> None:
        mistake = OutsideKernel()
        super().__init__(f"{mistake.title}\nhelp: {mistake.help}")


@contextmanager
def activate(new: Emitter) -> Iterator[Emitter]:
    """Makes `new` current for a `with` block."""
    _stack.append(new)
    try:
        yield new
    finally:
        _stack.pop()


def builtin(fn: F) -> F:
    """Marks a function of the language: kernels may call it, with run-time or constant values."""
    fn.__mt_builtin__ = True  # type: ignore[attr-defined]  # functions take any attribute
    return fn
