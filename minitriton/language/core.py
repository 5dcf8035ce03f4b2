"""`tl.core`: the language's functions and types where Triton defines them."""

from __future__ import annotations

from typing import Any

from minitriton.frontend.active import builtin
from minitriton.frontend.constants import flag, integer
from minitriton.frontend.errors_semantic import BadOption
from minitriton.frontend.values import constexpr
from minitriton.ir import dtypes

CONSTEXPR_0 = constexpr(0)  # a default that kernels take from here
_NAMES = {t.name: t for t in dtypes.ALL}


@builtin
def get_int_dtype(bitwidth: Any, signed: Any) -> dtypes.dtype:
    """The integer type of so many bits."""
    bits, prefix = integer(bitwidth, "bitwidth"), "" if flag(signed, "signed") else "u"
    if bits not in (1, 8, 16, 32, 64):
        raise BadOption("bitwidth", bits, ("1", "8", "16", "32", "64"))
    return _NAMES["int1" if bits == 1 else f"{prefix}int{bits}"]


def __getattr__(name: str) -> Any:
    from minitriton import language

    if name in language.__all__:
        return getattr(language, name)
    raise AttributeError(f"module 'minitriton.language.core' has no attribute {name!r}")
