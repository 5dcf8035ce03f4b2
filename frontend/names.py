"""What a name that is not local means: closure and module values that kernels may capture."""

from __future__ import annotations

import enum
import types
from typing import Any

from minitriton.frontend.errors import (
    NonConstexprGlobal,
    UndefinedName,
    UnsupportedBuiltin,
    kind_of,
)
from minitriton.frontend.frame import Frame
from minitriton.frontend.python_builtins import REPLACEMENTS
from minitriton.frontend.source import MISSING, ConstexprFunction, source_of
from minitriton.frontend.values import constexpr
from minitriton.ir import dtypes

_TYPES = (dtypes.dtype, dtypes.pointer_type, dtypes.block_type)
_CAPTURED = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


def resolve(frame: Frame, name: str) -> Any:
    """Value of an outer name; a mistake if there is none or a kernel may not capture it."""
    source = frame.source
    value = source.outer(name)
    if value is MISSING:
        raise UndefinedName(name, (*frame.names, *source.outer_names()))
    if isinstance(value, constexpr):
        return value.value
    if source_of(value) is not None or isinstance(value, (ConstexprFunction, *_TYPES)):
        return value
    if getattr(value, "__module__", None) == "builtins" and value not in REPLACEMENTS:
        available = ", ".join(sorted(fn.__name__ for fn in REPLACEMENTS))
        raise UnsupportedBuiltin(name, available)
    if isinstance(value, (*_CAPTURED, enum.Enum)) or value is None or value is Ellipsis:
        return value
    if source.is_library or source.annotated_constexpr(name):
        return value
    raise NonConstexprGlobal(name, kind_of(value))
