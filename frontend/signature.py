"""What a kernel is compiled for: parameter kinds, constexpr values and launch options.

A `Specialization` is pure data without MLIR or torch. It is hashable, and `key_text()` is its
canonical form for the disk cache: equal texts mean equal code, across processes and hash seeds.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["constexpr", "pointer", "scalar", "tuple", "descriptor"]


@dataclass(frozen=True, slots=True)
class Blocks:
    """What is known of an array that is passed as a tensor descriptor.

    `parts` are its base, its shape and its strides without the last; `aligned`: the last size is a
    multiple of 16 bytes.
    """

    block_shape: tuple[int, ...]
    padding: str
    parts: tuple[ParamSpec, ...]
    aligned: bool


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter.

    `constexpr`: `value` is the Python value. `pointer`: `dtype` names the element. `scalar`:
    `dtype` names the type. `tuple`: `value` holds the elements' ParamSpecs, and `dtype` the name of
    the namedtuple class, or "". `descriptor`: `value` is a Blocks. `divisible`: address or integer
    is a multiple of 16.
    """

    name: str
    kind: Kind
    dtype: str = ""
    value: Any = None
    divisible: bool = False
    const: bool = False
    multiple: int = 1  # of a descriptor's part: what it is a multiple of, as the whole implies

    def key_text(self) -> str:
        """Canonical text, e.g. `x:*fp32:16`, `n:int32`, `BLOCK=int 1024`."""
        tail = ":16" if self.divisible else ""
        match self.kind:
            case "constexpr":
                return f"{self.name}={value_text(self.value)}"
            case "pointer":
                return f"{self.name}:*{'k' if self.const else ''}{self.dtype}{tail}"
            case "scalar":
                return f"{self.name}:{self.dtype}{tail}"
            case "tuple":
                return f"{self.name}:{self.dtype}({', '.join(p.key_text() for p in self.value)})"
            case "descriptor":
                blocks, tail = self.value, ":16" if self.value.aligned else ""
                shape = list(blocks.block_shape)
                return f"{self.name}:descriptor({self.dtype}{shape}{tail}, {blocks.padding})"

    def runtime_leaves(self) -> Iterator[ParamSpec]:
        """The parts that become parameters of the compiled function, in order."""
        if self.kind == "tuple":
            for element in self.value:
                yield from element.runtime_leaves()
        elif self.kind == "descriptor":
            yield from self.value.parts
        elif self.kind != "constexpr":
            yield self


@dataclass(frozen=True, slots=True)
class Specialization:
    """All parameters in order, and the options of the launch that change code."""

    params: tuple[ParamSpec, ...]
    num_warps: int = 4
    num_stages: int = 3
    num_ctas: int = 1
    maxnreg: int | None = None
    options: tuple[tuple[str, Any], ...] = ()  # further options, sorted by name

    def option(self, name: str, default: Any = None) -> Any:
        """Value of a further option such as `debug` or `enable_fp_fusion`."""
        return dict(self.options).get(name, default)

    def param(self, name: str) -> ParamSpec:
        """The parameter called `name`; KeyError if there is none."""
        for candidate in self.params:
            if candidate.name == name:
                return candidate
        raise KeyError(name)

    def runtime_params(self) -> tuple[ParamSpec, ...]:
        """What the compiled function takes, in order: constexprs gone, tuples flattened."""
        return tuple(leaf for param in self.params for leaf in param.runtime_leaves())

    def key_text(self) -> str:
        """Canonical text of everything here, one item a line."""
        lines = [param.key_text() for param in self.params]
        lines.append(f"num_warps={self.num_warps} num_stages={self.num_stages}")
        lines.append(f"num_ctas={self.num_ctas} maxnreg={self.maxnreg}")
        lines += [f"{name}={value_text(value)}" for name, value in sorted(self.options)]
        return "\n".join(lines)


def value_text(value: Any) -> str:
    """Canonical text of a constexpr value; TypeError if it has none.

    The type is part of it (`1`, `True` and `1.0` give different code), floats are in hexadecimal.
    Jit functions and other objects of ours say it themselves through `cache_text()`.
    """
    match value:
        case None:
            return "None"
        case bool():
            return f"bool {value}"
        case enum.Enum():
            return f"enum {type(value).__qualname__}.{value.name}"
        case int():
            return f"int {int(value)}"
        case float():
            return f"float {value.hex()}"
        case str():
            return f"str {value!r}"
        case bytes():
            return f"bytes {value.hex()}"
        case tuple() | list():
            name = type(value).__name__
            fields = getattr(value, "_fields", ())
            return f"{name}{list(fields) or ''}({', '.join(value_text(v) for v in value)})"
        case dict():
            items = (f"{value_text(k)}: {value_text(v)}" for k, v in value.items())
            return f"dict({', '.join(items)})"
        case slice():
            return f"slice({value_text((value.start, value.stop, value.step))})"
    if hasattr(value, "cache_text"):
        return f"{type(value).__name__} {value.cache_text()}"
    if type(value).__module__ == "minitriton.ir.dtypes":
        return f"type {value}"
    if hasattr(value, "__mt_builtin__"):
        return f"builtin {value.__module__}.{value.__qualname__}"
    if type(value).__name__ == "constexpr":
        return value_text(value.value)
    raise TypeError(
        f"a value of type {type(value).__name__} cannot be a constexpr: use numbers, strings, "
        "tuples, types, jit functions or functions of the language"
    )
