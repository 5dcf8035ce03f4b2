"""A kernel's parameters, and the Python function that binds one call to them in a microsecond.

`dispatcher_source` writes, per kernel, a function with the kernel's own signature. It forms the
in-memory key of a call on CUDA tensors (dtype, alignment, integer class, constexpr values) inline
and launches at once if that key was seen; anything unusual goes to `general`, which is thorough.
All its own names start with `_mt_`, so that no parameter's name can clash.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from minitriton.frontend.signature import value_text
from minitriton.runtime.arguments import ArgumentError
from minitriton.specialize import Parameter

OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")


def parameters_of(
    function: Callable[..., Any],
    signature: inspect.Signature,
    skip: Sequence[str | int] = (),
    skip_alignment: Sequence[str | int] = (),
) -> tuple[Parameter, ...]:
    """The parameters; `skip` and `skip_alignment` name or number those not to be specialised."""
    found = []
    for index, parameter in enumerate(signature.parameters.values()):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(
                f"kernel '{function.__name__}' takes *{parameter.name}: "
                "a kernel's parameters must be listed one by one (tuples are allowed as values)"
            )
        dtype, is_pointer, const = _annotated_type(parameter.annotation)
        fixed = parameter.name in skip or index in skip
        loose = parameter.name in skip_alignment or index in skip_alignment
        found.append(
            Parameter(
                parameter.name,
                is_constexpr_annotation(parameter.annotation),
                dtype,
                is_pointer,
                const,
                specialize=not fixed,
                specialize_alignment=not loose,
            )
        )
    known = {p.name for p in found} | set(range(len(found)))
    for wrong in [name for name in (*skip, *skip_alignment) if name not in known]:
        raise ValueError(
            f"kernel '{function.__name__}' has no parameter {wrong!r} to leave general"
        )
    return tuple(found)


def is_constexpr_annotation(annotation: Any) -> bool:
    """Whether an annotation (an object, or text under postponed evaluation) says constexpr."""
    if isinstance(annotation, str):
        return annotation.strip("'\" ").split("[")[0].split(".")[-1] == "constexpr"
    return "constexpr" in (getattr(annotation, "__name__", ""), type(annotation).__name__)


def _annotated_type(annotation: Any) -> tuple[str, bool, bool]:
    """(dtype name, is a pointer, const) from an annotation; ("", False, False) if it says none."""
    from minitriton.ir import dtypes

    if isinstance(annotation, str):
        text = annotation.strip("'\" ").split(".")[-1]
        if text == "const":
            return "", False, True
        try:
            annotation = dtypes.parse(text)
        except ValueError:
            return "", False, False
    if isinstance(annotation, dtypes.pointer_type):
        return annotation.element_ty.name, True, annotation.const
    if isinstance(annotation, dtypes.dtype):
        return annotation.name, False, False
    return "", False, getattr(annotation, "__name__", "") == "const"


def constexpr_key(name: str, value: Any) -> Any:
    """A hashable stand-in for a constexpr value that tells 1, True and 1.0 apart."""
    kind = type(value)
    if kind is bool or kind is str:
        return kind, value
    if value is None:
        return None
    try:
        return kind, value_text(value)
    except TypeError as error:
        raise ArgumentError(f"argument '{name}': {error}") from None


def freeze(further: dict[str, Any]) -> Any:
    """A hashable form of uncommon launch options."""
    return tuple((name, constexpr_key(name, further[name])) for name in sorted(further))


_HEAD = "def {function}(_mt_grid, /{parameters}{star}{options}, **_mt_further):\n    _mt_dev = None"
_RUNTIME = """
    _mt_t = _mt_type({name})
    if _mt_t is _mt_Tensor or _mt_t is _mt_Parameter:
        _mt_v{i} = {name}.data_ptr(); _mt_k{i} = {name}.dtype
        _mt_d = {name}.get_device()
        if _mt_d != _mt_dev:
            if _mt_dev is not None:
                return _mt_general({everything})
            _mt_dev = _mt_d
        if not _mt_v{i}:
            return _mt_general({everything})
        _mt_a{i} = {alignment}
    elif _mt_t is _mt_int:
        _mt_v{i} = {name}
        if -2147483648 <= {name} <= 2147483647:
            _mt_k{i} = {one}
        elif -9223372036854775808 <= {name} <= 18446744073709551615:
            _mt_k{i} = 3 if {name} <= 9223372036854775807 else 4
        else:
            return _mt_general({everything})
        _mt_a{i} = {alignment}
    elif _mt_t is _mt_float or _mt_t is _mt_bool:
        _mt_v{i} = {name}; _mt_k{i} = _mt_t; _mt_a{i} = False
    elif {name} is None:
        _mt_v{i} = _mt_k{i} = None; _mt_a{i} = False
    else:
        return _mt_general({everything})"""
_CONSTEXPR = """
    _mt_k{i} = {name} if _mt_type({name}) is _mt_int else _mt_constexpr_key({name!r}, {name})"""
_TAIL = """
    if _mt_dev is None or _mt_dev < 0 or _mt_hooks or _mt_own_hooks:
        return _mt_general({everything})
    _mt_key = ({keys}_mt_dev, {options}, _mt_freeze(_mt_further) if _mt_further else None)
    try:
        _mt_launch, _mt_compiled, _mt_unchanged = _mt_seen[_mt_key]
    except _mt_KeyError:
        _mt_launch = None
    if _mt_launch is None or (_mt_unchanged is not None and not _mt_unchanged()):
        _mt_launch, _mt_compiled, _ = _mt_first(
            _mt_key, _mt_dev, {values}, {option_values}, _mt_further)
    if _mt_type(_mt_grid) is not _mt_tuple and _mt_callable(_mt_grid):
        _mt_grid = _mt_grid(_mt_dict({meta}))
    if (_mt_type(_mt_grid) is _mt_tuple and _mt_len(_mt_grid) == 1
            and _mt_type(_mt_grid[0]) is _mt_int and 0 < _mt_grid[0] <= 2147483647):
        _mt_launch(_mt_grid[0], 1, 1, _mt_stream(_mt_dev){passed})
        return _mt_compiled
    _mt_x, _mt_y, _mt_z = _mt_normalize(_mt_grid, {title!r})
    if _mt_x and _mt_y and _mt_z:
        _mt_launch(_mt_x, _mt_y, _mt_z, _mt_stream(_mt_dev){passed})
    return _mt_compiled
"""


def dispatcher_source(
    function: str, parameters: Sequence[Parameter], signature: inspect.Signature
) -> str:
    """Python source of the dispatcher. Its runtime values are passed on as `_mt_v<index>`."""
    names = [p.name for p in parameters]
    defaults = {p.name: p.default is not p.empty for p in signature.parameters.values()}
    keyword_only = [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    written = ""
    for index, name in enumerate(names):
        if name in keyword_only and name == keyword_only[0]:
            written += ", *"
        written += f", {name}" + (f"=_mt_default{index}" if defaults[name] else "")
    options = [option for option in OPTIONS if option not in names]
    values = "(" + "".join(f"{name}, " for name in names) + ")"
    option_values = "{" + ", ".join(f"{o!r}: {o}" for o in OPTIONS) + "}"
    everything = f"_mt_grid, {values}, {option_values}, _mt_further"
    text = _HEAD.format(
        function=function,
        parameters=written,
        star="" if keyword_only or not options else ", *",
        options="".join(f", {option}=None" for option in options),
    )
    keys = ""
    for i, parameter in enumerate(parameters):
        name = parameter.name
        if parameter.is_constexpr:
            text += _CONSTEXPR.format(i=i, name=name)
            keys += f"_mt_k{i}, "
            continue
        aligned = parameter.specialize and parameter.specialize_alignment
        text += _RUNTIME.format(
            i=i,
            name=name,
            everything=everything,
            alignment=f"not _mt_v{i} & 15" if aligned else "False",
            one=f"1 if {name} == 1 else 2" if parameter.specialize else "2",
        )
        keys += f"_mt_k{i}, _mt_a{i}, "
    runtime = [i for i, p in enumerate(parameters) if not p.is_constexpr]
    shown = [*names, *options]
    return text + _TAIL.format(
        everything=everything,
        keys=keys,
        options=", ".join(OPTIONS),
        values=values,
        option_values=option_values,
        meta=", ".join(f"{name}={name}" for name in shown),
        title=function,
        passed="".join(f", _mt_v{i}" for i in runtime),
    )
