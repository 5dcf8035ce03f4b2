"""Functions of the language on the program instance, and promises to the compiler."""

from __future__ import annotations

from typing import Any

from minitriton.frontend import constants
from minitriton.frontend.active import builtin, emitter
from minitriton.frontend.arithmetic import to_bool
from minitriton.frontend.casting import to_tensor
from minitriton.frontend.errors import BadCondition, NotConstexpr, kind_of
from minitriton.frontend.errors_semantic import GridAxis, HintLength
from minitriton.frontend.values import Tensor, unwrap
from minitriton.ir import dtypes


def _grid_axis(value: Any) -> int:
    axis = constants.integer(value, "the grid axis")
    if not 0 <= axis <= 2:
        raise GridAxis(axis)
    return axis


@builtin
def program_id(axis: Any) -> Tensor:
    """Index of this program along grid `axis` (0..2): int32."""
    e = emitter()
    return e.op("mt.program_id", dtypes.int32, (), {"axis": e.i32(_grid_axis(axis))})


@builtin
def num_programs(axis: Any) -> Tensor:
    """Number of programs along grid `axis` (0..2): int32."""
    e = emitter()
    return e.op("mt.num_programs", dtypes.int32, (), {"axis": e.i32(_grid_axis(axis))})


def _hint(function: str, kind: str, value: Any, promises: Any) -> Any:
    items = unwrap(promises)
    items = tuple(items) if isinstance(items, tuple | list) else (items,)
    numbers = [constants.integer(item, f"the argument of {function}") for item in items]
    if not isinstance(value, Tensor):
        return value
    rank = max(len(value.shape), 1)
    if len(numbers) != rank:
        raise HintLength(function, len(numbers), rank)
    e = emitter()
    return e.op("mt.hint", value.type, [value], {kind: e.array64(numbers)})


@builtin
def multiple_of(input: Any, values: Any) -> Any:
    """`input`, with the promise that along each dimension it starts at multiples of `values`."""
    return _hint("tl.multiple_of", "divisibility", input, values)


@builtin
def max_contiguous(input: Any, values: Any) -> Any:
    """`input`, with the promise that the first `values` elements of each group count up by one."""
    return _hint("tl.max_contiguous", "contiguity", input, values)


@builtin
def max_constancy(input: Any, values: Any) -> Any:
    """`input`, with the promise that each group of `values` elements is equal."""
    return _hint("tl.max_constancy", "constancy", input, values)


@builtin
def assume(cond: Any) -> None:
    """Promise that a scalar condition holds."""
    e = emitter()
    if not isinstance(cond, Tensor):
        if not unwrap(cond):
            raise NotConstexpr("the condition of tl.assume", "false", "true")
        return
    if cond.is_tile:
        raise BadCondition("tl.assume", kind_of(cond))
    e.effect("mt.assume", [to_bool(e, to_tensor(e, cond))])


@builtin
def gdc_wait() -> None:
    """Waits until the kernel before this one in the stream has ended and its writes are visible;
    under the launch option launch_pdl this one may have started before."""
    emitter().effect("mt.grid_wait")


@builtin
def gdc_launch_dependents() -> None:
    """Lets the next kernel in the stream, if it has launch_pdl, start once all programs came here
    or ended. What this one writes is there after that kernel's gdc_wait."""
    emitter().effect("mt.grid_launch")
