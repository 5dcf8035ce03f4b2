"""A kernel's parameters, and the Python function that binds one call to them in a microsecond.

`dispatcher_source` writes, per kernel, a function with the kernel's own signature. It forms the
in-memory key of a call on CUDA tensors (dtype, alignment, integer class, constexpr values) inline
and launches at once if that key was seen; anything unusual goes to `general`, which is thorough.
Tuples go through a function that `leaves_source` writes from the same rules. All names of ours
start with `_mt_`, so that no parameter's name can clash.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from textwrap import indent
from typing import Any

from minitriton.frontend.signature import value_text
from minitriton.runtime.arguments import ArgumentError
from minitriton.specialize import Parameter, is_constant

OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
Rule = tuple[bool, bool]  # whether ints are specialised, and whether divisibility is


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
        return kind, value.cache_text() if hasattr(kind, "cache_text") else value_text(value)
    except TypeError as error:
        raise ArgumentError(f"argument '{name}': {error}") from None


def constant_key(value: Any) -> tuple[type, str] | None:
    """Key of a value that is a constexpr by itself; None for all others and those without text."""
    if not is_constant(value):
        return None
    try:
        return type(value), value_text(value)
    except TypeError:  # the thorough way says which argument it is
        return None


def freeze(further: dict[str, Any]) -> Any:
    """A hashable form of uncommon launch options."""
    return tuple([(name, constexpr_key(name, value)) for name, value in sorted(further.items())])


# The inner function is made anew for each `kernel[grid]`: a call then costs one Python frame.
_HEAD = """
def _mt_for(_mt_grid):
    def {function}({parameters}, **_mt_further):
        try:
            while True:  # left at once: `break` is for what the thorough way must see
                _mt_dev = None{bindings}
                if _mt_dev is None or _mt_dev < 0 or _mt_hooks or _mt_own_hooks:
                    break
                _mt_o = None
                if not ({defaults}):
                    _mt_o = ({options_tuple})
                _mt_key = ({keys}_mt_dev, _mt_o, _mt_freeze(_mt_further) if _mt_further else None)
                try:
                    _mt_launch, _mt_compiled, _mt_unchanged, _mt_memory = _mt_seen[_mt_key]
                except _mt_KeyError:
                    _mt_launch = None
                if _mt_launch is None or (_mt_unchanged is not None and not _mt_unchanged()):
                    _mt_launch, _mt_compiled, _, _mt_memory = _mt_first(
                        _mt_key, _mt_dev, {values}, {option_values}, _mt_further)
                if _mt_memory is not None:
                    _mt_launch = _mt_partial(_mt_launch, memory=_mt_memory({runtime}))
                _mt_g = _mt_grid
                if _mt_type(_mt_g) is not _mt_tuple and _mt_callable(_mt_g):
                    _mt_g = _mt_g(_mt_dict({meta}))
                if (_mt_type(_mt_g) is _mt_tuple and _mt_len(_mt_g) == 1
                        and _mt_type(_mt_g[0]) is _mt_int and 0 < _mt_g[0] <= 2147483647):
                    _mt_launch(_mt_g[0], 1, 1, _mt_stream(_mt_dev){passed})
                    return _mt_compiled
                _mt_x, _mt_y, _mt_z = _mt_normalize(_mt_g, {title!r})
                if _mt_x and _mt_y and _mt_z:
                    _mt_launch(_mt_x, _mt_y, _mt_z, _mt_stream(_mt_dev){passed})
                return _mt_compiled
            return _mt_general({everything})
        except (_mt_TypeError, _mt_OverflowError, _mt_struct_error) as _mt_error:
            return _mt_again(_mt_error, {everything})
    return {function}
"""
# Keys: a tensor's dtype (in a tuple if misaligned); 1 for the number one, 2 to 4 for other ints by
# width, 10 more if divisible by 16; the types float and bool; None; for tuples and descriptors see
# _LEAVES.
_RUNTIME = """
            _mt_t = _mt_type({name})
            if _mt_t is _mt_Tensor or _mt_t is _mt_Parameter:
                _mt_v{i} = {name}.data_ptr()
                _mt_k{i} = {tensor_key}
                _mt_d = {name}.get_device()
                if _mt_d != _mt_dev:
                    if _mt_dev is not None:
                        {unusual}
                    _mt_dev = _mt_d
                if not _mt_v{i} and {name}.numel():
                    {unusual}
            elif _mt_t is _mt_int:
                _mt_v{i} = {name}
                if -2147483648 <= {name} <= 2147483647:
                    _mt_k{i} = {int_key}
                elif -9223372036854775808 <= {name} <= 18446744073709551615:
                    _mt_k{i} = (3 if {name} <= 9223372036854775807 else 4) + {wide_key}
                else:
                    {unusual}
            elif _mt_t is _mt_float or _mt_t is _mt_bool:
                _mt_v{i} = {name}; _mt_k{i} = _mt_t
            elif {name} is None:
                _mt_v{i} = _mt_k{i} = None
            else:
                _mt_found = {leaves}({name}, _mt_dev)
                if _mt_found is None:
                    {unusual}
                _mt_k{i}, _mt_v{i}, _mt_dev = _mt_found"""
# Of a tuple: the key, its class before its items' keys; the values in a list; the device, if one
# is known by now. None for what is unusual. Of a tensor descriptor: what `quick` says.
_LEAVES = """
def {function}(_mt_items, _mt_dev):
    _mt_class = _mt_type(_mt_items)
    if _mt_class is _mt_TensorDescriptor:
        try:
            return _mt_quick(_mt_items, _mt_dev, (_mt_Tensor, _mt_Parameter))
        except (_mt_TypeError, _mt_RuntimeError):  # wrong fields, a tensor without an address
            return None
    if _mt_class is not _mt_tuple:
        _mt_key = _mt_constant_key(_mt_items)
        if _mt_key is not None:
            return _mt_key, None, _mt_dev
        if not _mt_isinstance(_mt_items, _mt_tuple):
            return None
    _mt_keys = [_mt_class]
    _mt_values = []
    try:
        for _mt_item in _mt_items:{binding}
            _mt_keys.append(_mt_k)
            _mt_values.append(_mt_v)
    except _mt_RuntimeError:  # a tensor without an address
        return None
    return _mt_tuple(_mt_keys), _mt_values, _mt_dev
"""
# A constexpr's key: of an int or a str itself, of others what `constexpr_key` says.
_CONSTEXPR = """
            _mt_t = _mt_type({name})
            if _mt_t is _mt_int or _mt_t is _mt_str:
                _mt_k{i} = {name}
            elif _mt_t is _mt_bool:
                _mt_k{i} = _mt_bool, {name}
            else:
                _mt_k{i} = _mt_constexpr_key({name!r}, {name})"""


def dispatcher_source(
    function: str, parameters: Sequence[Parameter], signature: inspect.Signature
) -> str:
    """Python source of `_mt_for(grid)`, which makes the function that binds and launches.

    Runtime values are passed on as `_mt_v<index>`, those of a tuple in a list. The functions of
    `leaves_source` that it calls come with it.
    """
    names = [p.name for p in parameters]
    has_default = {p.name: p.default is not p.empty for p in signature.parameters.values()}
    keyword_only = [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    written = []
    for index, name in enumerate(names):
        if keyword_only and name == keyword_only[0]:
            written.append("*")
        written.append(name + (f"=_mt_default{index}" if has_default[name] else ""))
    options = [option for option in OPTIONS if option not in names]
    values = "(" + "".join(f"{name}, " for name in names) + ")"
    option_values = "{" + ", ".join(f"{o!r}: {o}" for o in OPTIONS) + "}"
    everything = f"_mt_grid, {values}, {option_values}, _mt_further"
    runtime = [i for i, p in enumerate(parameters) if not p.is_constexpr]
    if options and not keyword_only:
        written.append("*")
    rules = sorted({_rule(parameters[i]) for i in runtime})
    return "".join(map(leaves_source, rules)) + _HEAD.format(
        function=function,
        parameters=", ".join([*written, *(f"{option}=None" for option in options)]),
        bindings="".join(_binding(i, p) for i, p in enumerate(parameters)),
        everything=everything,
        defaults=" is ".join([*OPTIONS, "None"]),
        options_tuple=", ".join(OPTIONS),
        keys="".join(f"_mt_k{i}, " for i in range(len(parameters))),
        values=values,
        runtime="(" + "".join(f"{names[i]}, " for i in runtime) + ")",
        option_values=option_values,
        meta=", ".join(f"{name}={name}" for name in [*names, *options]),
        title=function,
        passed="".join(f", _mt_v{i}" for i in runtime),
    )


def name_inner_function(outer: Any, name: str) -> None:
    """Give the function that `outer` makes a plain name: Python's binding errors show it."""
    constants = (
        c.replace(co_qualname=name) if isinstance(c, types.CodeType) else c
        for c in outer.__code__.co_consts
    )
    outer.__code__ = outer.__code__.replace(co_consts=tuple(constants))


def _binding(i: int, parameter: Parameter) -> str:
    """The lines that find the value and the key of one parameter."""
    name = parameter.name
    if parameter.is_constexpr:
        return indent(_CONSTEXPR.format(i=i, name=name), "    ")
    return indent(_runtime(i, name, _rule(parameter), "break"), "    ")


def leaves_source(rule: Rule) -> str:
    """Python source of the function that finds values and keys of a tuple's items."""
    binding = _runtime("", "_mt_item", rule, "return None")
    return _LEAVES.format(function=_leaves_name(rule), binding=binding)


def _rule(parameter: Parameter) -> Rule:
    return parameter.specialize, parameter.specialize and parameter.specialize_alignment


def _leaves_name(rule: Rule) -> str:
    return f"_mt_leaves{rule[0]:d}{rule[1]:d}"


def _runtime(i: int | str, name: str, rule: Rule, unusual: str) -> str:
    """The lines that find the value and the key of what `name` holds at run time."""
    specialize, aligned = rule
    sixteen = f"(0 if {name} & 15 else 10)" if aligned else "0"
    narrow_key = f"2 if {name} & 15 else 12" if aligned else "2"
    dtype = f"{name}.dtype"
    return _RUNTIME.format(
        i=i,
        name=name,
        unusual=unusual,
        leaves=_leaves_name(rule),
        tensor_key=f"({dtype},) if _mt_v{i} & 15 else {dtype}" if aligned else dtype,
        int_key=f"1 if {name} == 1 else {narrow_key}" if specialize else "2",
        wide_key=sixteen,
    )
