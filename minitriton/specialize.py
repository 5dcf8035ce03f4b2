"""From the values of one call to what the kernel is compiled for: Triton's specialisation rules.

int 1 and None become constexprs, integers and addresses that are multiples of 16 are marked, floats
are fp32, ints the narrowest of int32, int64, uint64, tuples are taken apart. Annotations override.
"""

from __future__ import annotations

import difflib
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minitriton.frontend.signature import ParamSpec, Specialization, value_text
from minitriton.ir.target import ROW_SPLIT_WARPS
from minitriton.runtime.arguments import (
    HOST,
    Argument,
    ArgumentError,
    classify,
    dtype_name,
    refuse,
)
from minitriton.tools.tensor_descriptor import TensorDescriptor, understand

ALIGNMENT = 16
_CODES = {"fp16": "e", "bf16": "f", "fp32": "f", "fp64": "d"}
DEFAULTS: dict[str, Any] = {"num_warps": 4, "num_stages": 3, "num_ctas": 1, "maxnreg": None}
# Further launch options and their defaults; a value equal to the default is not recorded.
FURTHER: dict[str, Any] = {
    "debug": False,
    "enable_fp_fusion": True,
    "sanitize_overflow": False,
    "launch_pdl": None,
    "launch_cooperative_grid": False,
    "warp_specialize": None,
}
# Options of Triton's other targets: kernels for several pass them, and they change nothing here.
FOREIGN = frozenset({"waves_per_eu", "matrix_instr_nonkdim", "kpack", "schedule_hint"})
LAUNCH_OPTIONS = frozenset({*DEFAULTS, *FURTHER, *FOREIGN})


@dataclass(frozen=True, slots=True)
class Parameter:
    """A kernel's parameter as its author wrote it."""

    name: str
    is_constexpr: bool = False
    dtype: str = ""  # from an annotation; of the element if `is_pointer`
    is_pointer: bool = False
    const: bool = False
    specialize: bool = True  # on being 1 and on divisibility
    specialize_alignment: bool = True


@dataclass(frozen=True, slots=True)
class Call:
    """One call, understood: what to compile, and the values that the compiled function takes."""

    spec: Specialization
    leaves: tuple[tuple[str, Argument], ...]
    device: int | None  # CUDA index, HOST, or None if no array was passed


def specialize(
    kernel: str,
    parameters: Sequence[Parameter],
    values: Sequence[Any],
    launch_options: Mapping[str, Any],
) -> Call:
    """Understand one call of `kernel`; ArgumentError names what cannot be passed.

    `launch_options` holds num_warps and the like; those that are None take their defaults.
    """
    params, leaves = [], []
    for parameter, value in zip(parameters, values, strict=True):
        param, found = _parameter(parameter, parameter.name, value)
        params.append(param)
        leaves += found
    options = check_options(kernel, launch_options)
    fixed = {name: options.pop(name) for name in DEFAULTS}
    further = tuple(sorted(options.items()))
    spec = Specialization(tuple(params), **fixed, options=further)
    return Call(spec, tuple(leaves), common_device(leaves))


def _parameter(
    parameter: Parameter, name: str, value: Any
) -> tuple[ParamSpec, list[tuple[str, Argument]]]:
    """The ParamSpec of one value, and its runtime parts."""
    if parameter.is_constexpr or is_constant(value):
        value = value.value if _is_constexpr(value) else value
        try:
            value_text(value)
        except TypeError as error:
            raise ArgumentError(f"argument '{name}': {error}") from None
        return ParamSpec(name, "constexpr", value=value), []
    if isinstance(value, TensorDescriptor):
        return understand(name, value)
    if isinstance(value, tuple):
        names = getattr(value, "_fields", range(len(value)))
        parts = [
            _parameter(parameter, f"{name}.{sub}", item)
            for sub, item in zip(names, value, strict=True)
        ]
        kind = type(value).__qualname__ if hasattr(value, "_fields") else ""
        spec = ParamSpec(name, "tuple", kind, tuple(p for p, _ in parts))
        return spec, [leaf for _, found in parts for leaf in found]
    symbol = _symbol(name, value)
    if symbol is not None:
        spec, argument = symbol
        return spec, [(name, argument)]
    argument = classify(name, value)
    spec = _spec(parameter, name, argument)
    if spec.kind == "constexpr":
        return spec, []
    if spec.kind == "scalar" and spec.dtype.startswith(("fp", "bf")):
        argument = Argument("float", _rounded(spec.dtype, argument.value))
    return spec, [(name, argument)]


def is_constant(value: Any) -> bool:
    """Whether a value is a constexpr whatever its parameter: `tl.constexpr(x)`, a jit function."""
    return _is_constexpr(value) or hasattr(value, "cache_text")


def _is_constexpr(value: Any) -> bool:
    return type(value).__name__ == "constexpr" and hasattr(value, "value")


def _rounded(dtype: str, value: float) -> float:
    """`value` as a parameter of `dtype` can hold it: what is too large becomes infinite."""
    try:
        return float(struct.unpack("<" + _CODES[dtype], struct.pack("<" + _CODES[dtype], value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def _symbol(name: str, value: Any) -> tuple[ParamSpec, Argument] | None:
    """A dtype that stands for an aligned array in `warmup`."""
    module = type(value).__module__
    if module == "minitriton.ir.dtypes":
        is_pointer = hasattr(value, "element_ty") and not hasattr(value, "shape")
        dtype = value.element_ty.name if is_pointer else value.name
        const = bool(getattr(value, "const", False))
    elif module == "torch" and type(value).__name__ == "dtype":
        dtype, const = dtype_name(name, str(value)), False
    else:
        return None
    spec = ParamSpec(name, "pointer", dtype, divisible=True, const=const)
    return spec, Argument("array", 0, dtype, HOST)


def _spec(parameter: Parameter, name: str, argument: Argument) -> ParamSpec:
    value, wanted = argument.value, parameter.dtype
    if argument.kind == "none":
        return ParamSpec(name, "constexpr", value=None)
    if argument.kind == "array":
        if wanted and (not parameter.is_pointer or wanted != argument.dtype):
            star = "*" if parameter.is_pointer else ""
            refuse(name, f"an array of {argument.dtype}", f"it is annotated as '{star}{wanted}'")
        aligned = parameter.specialize and parameter.specialize_alignment
        divisible = aligned and value % ALIGNMENT == 0
        return ParamSpec(name, "pointer", argument.dtype, None, divisible, parameter.const)
    if parameter.is_pointer:
        refuse(name, f"{argument.kind} {value!r}", "it is annotated as a pointer: pass an array")
    if wanted:
        return _annotated(parameter, name, argument)
    if argument.kind == "bool":
        return ParamSpec(name, "scalar", "int1")
    if argument.kind == "float":
        return ParamSpec(name, "scalar", "fp32")
    if value == 1 and parameter.specialize:
        return ParamSpec(name, "constexpr", value=1)
    return ParamSpec(name, "scalar", integer_dtype(value), None, _divisible(parameter, value))


def _divisible(parameter: Parameter, value: int) -> bool:
    return parameter.specialize and parameter.specialize_alignment and value % ALIGNMENT == 0


def integer_dtype(value: int) -> str:
    """The narrowest of int32, int64 and uint64 that holds `value`."""
    if -(2**31) <= value < 2**31:
        return "int32"
    return "int64" if value < 2**63 else "uint64"


def _annotated(parameter: Parameter, name: str, argument: Argument) -> ParamSpec:
    """A number for a parameter whose scalar type the author fixed."""
    value, dtype = argument.value, parameter.dtype
    if dtype.startswith(("fp", "bf")):
        return ParamSpec(name, "scalar", dtype)
    if argument.kind == "float":
        refuse(name, f"float {value!r}", f"it is annotated as {dtype}: pass an int")
    bits = int(dtype.removeprefix("u").removeprefix("int"))
    low, high = (0, 2**bits) if dtype[0] == "u" or bits == 1 else (-(2 ** (bits - 1)), 2**bits // 2)
    if not low <= value < high:
        refuse(name, f"{value}", f"it is annotated as {dtype}, which holds {low} to {high - 1}")
    return ParamSpec(name, "scalar", dtype, None, bits > 1 and _divisible(parameter, value))


def places(spec: ParamSpec) -> Iterator[tuple[int, ...]]:
    """Where `spec.runtime_leaves()` stand in the value: an index for each level of tuples, and
    for a descriptor in the list that `quick` makes of it."""
    if spec.kind == "tuple":
        for index, element in enumerate(spec.value):
            for place in places(element):
                yield index, *place
    elif spec.kind == "descriptor":
        for index in range(len(spec.value.parts)):
            yield (index,)
    elif spec.kind != "constexpr":
        yield ()


def common_device(leaves: Sequence[tuple[str, Argument]]) -> int | None:
    """Where all arrays are; ArgumentError if they are in different places."""
    arrays = [(name, a) for name, a in leaves if a.kind == "array" and (a.memory or a.value)]
    if not arrays:
        return HOST if any(a.kind == "array" for _, a in leaves) else None
    on_gpu = [(name, a) for name, a in arrays if a.device != HOST]
    first_name, first = (on_gpu or arrays)[0]
    for name, argument in arrays:
        if argument.device != first.device and not argument.pinned:
            raise ArgumentError(
                f"argument '{name}' is on {_place(argument.device)}, but '{first_name}' is on "
                f"{_place(first.device)}\nhelp: move one of them, for example with "
                f"{name}.to({first_name}.device)"
            )
    return first.device


def _place(device: int) -> str:
    return "the CPU" if device == HOST else f"cuda:{device}"


def check_options(kernel: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Launch options with defaults filled in; ArgumentError for a wrong one."""
    options = dict(DEFAULTS)
    for name, value in given.items():
        if name in DEFAULTS:
            if value is not None:
                options[name] = _checked(kernel, name, value)
        elif name in FOREIGN:
            continue
        elif name not in FURTHER:
            _unknown(kernel, name)
        elif value != FURTHER[name]:
            options[name] = value
    return options


def _unknown(kernel: str, name: str) -> None:
    known = [*DEFAULTS, *FURTHER]
    close = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean '{close[0]}'?" if close else f"launch options are: {', '.join(known)}"
    raise ArgumentError(
        f"kernel '{kernel}' has no parameter '{name}', and it is no launch option\nhelp: {hint}"
    )


def _checked(kernel: str, name: str, value: Any) -> int:
    rules = {
        "num_warps": (
            value == ROW_SPLIT_WARPS or (1 <= value <= 32 and value & (value - 1) == 0),
            f"a power of two from 1 to 32, or {ROW_SPLIT_WARPS}",
        ),
        "num_stages": (0 <= value <= 32, "from 0 to 32"),
        "num_ctas": (value in (1, 2), "1 or 2 (CTAs of a cluster, which share copies)"),
        "maxnreg": (16 <= value <= 255, "from 16 to 255"),
    } if isinstance(value, int) and not isinstance(value, bool) else {}  # fmt: skip
    fits, expected = rules.get(name, (False, "an int"))
    if not fits:
        raise ArgumentError(f"{name} of '{kernel}' must be {expected}; got {value!r}")
    return int(value)
