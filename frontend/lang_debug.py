"""Functions of the language for debugging: printing, assertions, barriers."""

from __future__ import annotations

from typing import Any

from minitriton.frontend import constants
from minitriton.frontend.active import builtin, emitter
from minitriton.frontend.arithmetic import broadcast_to, to_bool
from minitriton.frontend.casting import to_tensor
from minitriton.frontend.errors import NotConstexpr, StaticAssertFailed, kind_of
from minitriton.frontend.values import Tensor, holds_tensor, tensors_in, unwrap


@builtin
def static_assert(cond: Any, msg: Any = "") -> None:
    """Stops compilation with `msg` unless `cond`, a compile-time value, is true."""
    if isinstance(cond, Tensor):
        raise NotConstexpr("the condition of tl.static_assert", kind_of(cond))
    if not cond:
        text = _text(msg)
        raise StaticAssertFailed(f": {text}" if text else "")


def _text(message: Any) -> str:
    """A message known at compile time."""
    if holds_tensor(message):
        raise NotConstexpr("the message", kind_of(message))
    return str(unwrap(message))


@builtin
def static_print(*values: Any, sep: str = " ", end: str = "\n", **_: Any) -> None:
    """Prints while compiling; run-time values show their type."""
    e = emitter()
    text = sep.join(f"<{v.type}>" if isinstance(v, Tensor) else str(v) for v in values)
    key = (e.place(), text)
    if key not in e.printed:  # a loop body may be built twice
        e.printed.add(key)
        print(text, end=end)


@builtin
def device_print(prefix: Any, *args: Any, hex: Any = False) -> None:
    """Prints `prefix` and the elements of `args` from the device."""
    if not isinstance(unwrap(prefix), str):
        raise NotConstexpr("the prefix of tl.device_print", kind_of(prefix), "a string")
    _print(str(unwrap(prefix)), args, constants.flag(hex, "hex"))


@builtin
def print_(*values: Any, sep: Any = " ", end: Any = "\n", hex: Any = False) -> None:
    """Python's print: compile-time values become part of the prefix."""
    texts = [str(v) for v in values if not holds_tensor(v)]
    _print(" ".join(texts), tuple(tensors_in(values)), constants.flag(hex, "hex"))


def _print(prefix: str, args: tuple[Any, ...], as_hex: bool) -> None:
    e = emitter()
    tensors = [to_tensor(e, arg, "an argument of tl.device_print") for arg in args]
    signs = [int(t.dtype.is_int() and t.dtype.is_int_signed()) for t in tensors]
    attributes = {
        "prefix": e.string(prefix),
        "signs": e.array32(signs),
        "hex": e.boolean(as_hex),
    }
    e.effect("mt.print", tensors, attributes)


@builtin
def device_assert(cond: Any, msg: Any = "", mask: Any = None) -> None:
    """Stops the program where `cond` is false and `mask` true; only with the option debug=True."""
    e = emitter()
    if not e.options.get("debug"):
        return
    condition = to_bool(e, cond)
    operands = [condition]
    if mask is not None:
        operands.append(broadcast_to(e, to_bool(e, mask), condition.shape))
    file, line, function = e.place()
    attributes = {
        "message": e.string(_text(msg)),
        "file": e.string(file),
        "line": e.i32(line),
        "function": e.string(function),
    }
    e.effect("mt.assert", operands, attributes)


@builtin
def debug_barrier() -> None:
    """All threads of the program meet here."""
    emitter().effect("mt.barrier")
