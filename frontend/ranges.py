"""What loops are driven by: ranges and conditions with options, sequences known at compile time."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from typing import Any

from minitriton.frontend.constants import flag
from minitriton.frontend.errors import NotConstexpr, NotIterable, RangeBounds, ZeroStep, kind_of
from minitriton.frontend.values import Tensor, unwrap


class range:
    """`range(stop)` or `range(start, stop, step)` with options for the loop it drives.

    `num_stages`: pipeline depth; `loop_unroll_factor`; `flatten`, `warp_specialize`,
    `disallow_acc_multi_buffer`, `disable_licm`: as in Triton. `num_stages`, `flatten` and
    `warp_specialize` promise that arguments the loop stores through do not overlap those it loads
    from. The bounds may be run-time scalars.
    """

    static = False
    __mt_builtin__ = True

    def __init__(
        self,
        arg1: Any,
        arg2: Any = None,
        step: Any = None,
        num_stages: Any = None,
        loop_unroll_factor: Any = None,
        disallow_acc_multi_buffer: Any = False,
        flatten: Any = False,
        warp_specialize: Any = False,
        disable_licm: Any = False,
    ) -> None:
        start, stop = (0, arg1) if arg2 is None else (arg1, arg2)
        self.start, self.stop = unwrap(start), unwrap(stop)
        self.step = 1 if step is None else unwrap(step)
        for what, value in (("start", self.start), ("end", self.stop), ("step", self.step)):
            whole = isinstance(value, int) or (
                isinstance(value, Tensor) and not value.is_tile and value.dtype.is_int()
            )
            if not whole:
                raise RangeBounds(what, kind_of(value))
        if not isinstance(self.step, Tensor) and self.step == 0:
            raise ZeroStep()
        self.options: dict[str, int] = {}
        for name, value in (("num_stages", num_stages), ("unroll", loop_unroll_factor)):
            plain = unwrap(value)
            if plain is not None:
                if not isinstance(plain, int):
                    raise NotConstexpr(f"the loop option '{name}'", kind_of(plain), "an integer")
                self.options[name] = plain
        flags = {
            "flatten": flatten,
            "warp_specialize": warp_specialize,
            "disallow_acc_multi_buffer": disallow_acc_multi_buffer,
            "disable_licm": disable_licm,
        }
        self.flags = tuple(name for name, value in flags.items() if unwrap(value))

    @property
    def bounds(self) -> tuple[Any, Any, Any]:
        """start, stop and step."""
        return self.start, self.stop, self.step


class static_range(range):
    """A range with constant bounds whose loop is unrolled while compiling."""

    static = True

    def __init__(self, arg1: Any, arg2: Any = None, step: Any = None) -> None:
        super().__init__(arg1, arg2, step)
        for value in self.bounds:
            if isinstance(value, Tensor):
                raise NotConstexpr("a bound of tl.static_range", kind_of(value), "an integer")


class condition:
    """What a `while` tests, with options of the loop. `disable_licm` is accepted without effect:
    nothing is moved out of a `while`."""

    __mt_builtin__ = True

    def __init__(self, arg1: Any, disable_licm: Any = False) -> None:
        self.value = unwrap(arg1)
        flag(disable_licm, "disable_licm")


_python_range = builtins.range


def static_items(value: Any) -> Iterator[Any]:
    """The items of a tuple or of a range with constant bounds."""
    if isinstance(value, range):
        for bound in value.bounds:
            if isinstance(bound, Tensor):
                raise NotConstexpr("a bound of this range", kind_of(bound), "an integer")
        return iter(_python_range(*value.bounds))
    if isinstance(value, tuple | list | str):
        return iter(value)
    raise NotIterable(kind_of(value))
