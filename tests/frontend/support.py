"""Builds kernels of the tests to verified tile IR, with launch signatures in short form."""

from __future__ import annotations

from typing import Any

from minitriton.frontend.build import build_module
from minitriton.frontend.signature import ParamSpec, Specialization
from minitriton.frontend.source import SourceFunction, source_of
from minitriton.ir.context import use
from minitriton.ir.target import Target


def param(name: str, value: Any) -> ParamSpec:
    """`"*fp32"` and `"*kfp32"` pointers, `"i32"`-like scalars, a tuple, else a constexpr."""
    if isinstance(value, tuple) and all(isinstance(v, str) for v in value):
        names = getattr(value, "_fields", range(len(value)))
        parts = tuple(param(f"{name}.{n}", v) for n, v in zip(names, value, strict=True))
        kind = type(value).__qualname__ if hasattr(value, "_fields") else ""
        return ParamSpec(name, "tuple", kind, parts)
    if isinstance(value, str) and value.startswith("*"):
        const = value.startswith("*k")
        return ParamSpec(name, "pointer", value[2 if const else 1 :], None, True, const)
    if isinstance(value, str) and not value.startswith("="):
        return ParamSpec(name, "scalar", value)
    return ParamSpec(name, "constexpr", value=value[1:] if isinstance(value, str) else value)


def build(kernel: Any, *, target: str = "sm_90a", debug: bool = False, **arguments: Any) -> str:
    """Verified IR text of `kernel` for one value per parameter (defaults count)."""
    source = source_of(kernel) or SourceFunction(kernel)
    params = tuple(
        param(p.name, arguments[p.name])
        if p.name in arguments
        else ParamSpec(p.name, "constexpr", value=p.default)
        for p in source.parameters
    )
    options = (("debug", True),) if debug else ()
    with use():
        module = build_module(source, Specialization(params, options=options), Target.parse(target))
        assert module.operation.verify()
        return str(module)
