"""A function of scalars run on each element: tl.map_elementwise."""

from __future__ import annotations

from typing import Any

from minitriton.frontend import arithmetic, constants
from minitriton.frontend.active import builtin, emitter
from minitriton.frontend.casting import to_tensor
from minitriton.frontend.errors_elementwise import (
    EffectsInMap,
    MapResults,
    NoResults,
    PackSize,
    TooManyValues,
)
from minitriton.frontend.lang_asm import MAX_VALUES
from minitriton.frontend.values import Tensor, unwrap
from minitriton.ir.dtypes import block_type

NAME = "tl.map_elementwise"


@builtin
def map_elementwise(scalar_fn: Any, *args: Any, pack: Any = 1) -> Any:
    """What the jit function `scalar_fn` returns for each element of `args`, a value or a tuple.

    `args` are broadcast together. With `pack` one call gets that many elements of the first
    argument, then of the next, and returns as many of each result; which ones come together is
    undefined. Branches and loops run for the elements that need them only. It must have no effects.
    """
    e = emitter()
    together = constants.integer(pack, "pack")
    if together < 1:
        raise PackSize("pack", together).about("pack")
    values = arithmetic.broadcast(e, *(to_tensor(e, arg, f"an argument of {NAME}") for arg in args))
    if len(values) * together > MAX_VALUES:
        raise TooManyValues(NAME, MAX_VALUES)
    if not any(v.is_tile for v in values):
        outcome = e.call(scalar_fn, [v for v in values for _ in range(together)])
        results = _results(outcome, together)[::together]
        return tuple(results) if isinstance(outcome, tuple) else results[0]
    place = e.builder.loc
    with e.detached([v.dtype for v in values for _ in range(together)]) as (block, arguments):
        outcome = e.call(scalar_fn, arguments)
        e.builder.loc = place
        yielded = _results(outcome, together)
        e.effect("mt.yield", yielded)
    e.builder.loc = place
    types = [block_type(v.dtype, values[0].shape) for v in yielded[::together]]
    attributes = {"pack": e.i32(together)}
    operation, tiles = e.multi("mt.map_elementwise", types, values, attributes, regions=1)
    block.append_to(operation.regions[0])
    effect = e.effect_in(operation)
    if effect is not None:
        raise EffectsInMap(effect).about("scalar_fn")
    return tuple(tiles) if isinstance(outcome, tuple) else tiles[0]


def _results(outcome: Any, pack: int) -> list[Tensor]:
    """What the function returned, as scalars: `pack` of a type for each result."""
    plain = unwrap(outcome)
    items = plain if isinstance(plain, tuple) else (plain,)
    if not items or plain is None:
        raise NoResults("the function").about("scalar_fn")
    scalars = [to_tensor(emitter(), item, "the result of scalar_fn") for item in items]
    if len(scalars) > MAX_VALUES:
        raise TooManyValues(NAME, MAX_VALUES).about("scalar_fn")
    types = [v.type for v in scalars]
    uneven = len(types) % pack or any(t != types[i - i % pack] for i, t in enumerate(types))
    if uneven or any(v.is_tile for v in scalars):
        raise MapResults(", ".join(map(str, types)), pack).about("scalar_fn")
    return scalars
