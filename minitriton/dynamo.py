"""Launches in functions under torch.compile: Dynamo leaves them to Python.

It knows nothing of our kernels and would trace through the launcher, the compiler and the emulator,
where it fails. So it is told to skip these files: a launch becomes a graph break, as any call that
Dynamo cannot trace. The library's operators (minitriton.kernels) stay in the graph.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_RULES = "torch._dynamo.trace_rules"
_PACKAGES = ("codegen", "frontend", "ir", "passes", "runtime")
_TRACED = frozenset(("sizes.py",))  # arithmetic that stands beside launches: cdiv
_GENERATED = ("<dispatcher of ", "<launcher of ", "<ptx ")  # what we compile from text


def outside(function: F) -> F:
    """Has Dynamo, where it is at work, look at nothing that the function calls."""

    hidden: F | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal hidden
        if hidden is None:
            dynamo = sys.modules.get("torch._dynamo")
            if dynamo is None or not hasattr(dynamo, "disable"):
                return function(*args, **kwargs)
            hidden = dynamo.disable(function)
        return hidden(*args, **kwargs)

    return call  # type: ignore[return-value]  # of the same signature


def keep_out() -> None:
    """Have Dynamo skip our files, now or when it is imported."""
    rules = sys.modules.get(_RULES)
    if rules is not None:
        _skip(rules)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _skip(rules: types.ModuleType) -> None:
    places, refresh = getattr(rules, "SKIP_DIRS", None), getattr(rules, "_recompile_re", None)
    if isinstance(places, list) and callable(refresh):  # as they are since torch 2.1
        places.extend(place for place in _places() if place not in places)
        refresh()


def _places() -> Iterator[str]:
    """What the names of files to skip begin with."""
    yield from _GENERATED
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.name not in _TRACED:
            yield str(path)
    for name in _PACKAGES:
        spec = importlib.util.find_spec(f"minitriton.{name}")
        for folder in (spec and spec.submodule_search_locations) or ():
            yield folder + os.sep


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for Dynamo's rules to be imported, and adds to them then."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _RULES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """A loader that adds our files once the module has run."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self.loader.exec_module(module)
        _skip(module)
