"""Triton's `knobs` as far as there is something to turn: names for MINITRITON_* variables.

    with minitriton.knobs.cache.scope():
        minitriton.knobs.cache.dir = "/tmp/other"

Reading a knob reads the environment, setting it sets the variable for the next compilation.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from minitriton import options


class Knobs:
    """A group of knobs: name -> (field of Options, whether the knob is its negation)."""

    _knobs: Mapping[str, tuple[str, bool]]

    def __init__(self, **knobs: tuple[str, bool]) -> None:
        object.__setattr__(self, "_knobs", knobs)

    def _field(self, name: str) -> tuple[str, bool]:
        if name not in self._knobs:
            raise AttributeError(f"there is no knob {name!r}, only {', '.join(self._knobs)}")
        return self._knobs[name]

    def __getattr__(self, name: str) -> Any:
        field, negated = self._field(name)
        value = getattr(options.read(), field)
        return not value if negated else value

    def __setattr__(self, name: str, value: Any) -> None:
        field, negated = self._field(name)
        if value is None:
            os.environ.pop(_variable(field), None)
        else:
            value = not value if negated else value
            os.environ[_variable(field)] = str(int(value) if isinstance(value, bool) else value)
        _reload()

    def __dir__(self) -> list[str]:
        return [*self._knobs, "reset", "scope"]

    def reset(self) -> None:
        """Takes all variables of the group away."""
        for name in self._knobs:
            setattr(self, name, None)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """What is set in a `with` block holds until its end."""
        variables = [_variable(field) for field, _ in self._knobs.values()]
        before = {variable: os.environ.get(variable) for variable in variables}
        try:
            yield
        finally:
            for variable, value in before.items():
                os.environ.pop(variable, None)
                if value is not None:
                    os.environ[variable] = value
            _reload()


def _variable(field: str) -> str:
    return f"MINITRITON_{field.upper()}"


def _reload() -> None:
    from minitriton.jit import reload_switches

    reload_switches()


cache = Knobs(dir=("cache_dir", False))
compilation = Knobs(always_compile=("cache", True))
runtime = Knobs(debug=("debug", False), override_arch=("target", False))
nvidia = Knobs(ptxas=("ptxas", False))
