"""Reductions and scans: the general forms, and sum, max, argmax, cumsum, ... built without AST."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from minitriton.frontend import arithmetic, constants, lang_math
from minitriton.frontend.active import builtin, emitter
from minitriton.frontend.casting import cast, to_tensor
from minitriton.frontend.errors import kind_of
from minitriton.frontend.errors_semantic import CombineResult, RankMismatch, TypesDiffer, WrongDtype
from minitriton.frontend.lang_shape import ravel
from minitriton.frontend.promotion import sum_type
from minitriton.frontend.values import Tensor, unwrap
from minitriton.ir import dtypes
from minitriton.ir.dtypes import block_type
from minitriton.ir.linear_layout import segments

Combine = Callable[..., Any]  # (a0, ..., an, b0, ..., bn) -> scalar or tuple of scalars


def _fold(
    op: str, values: Sequence[Tensor], axis: int, combine: Combine, attributes: dict[str, Any]
) -> list[Tensor]:
    """Emits mt.reduce or mt.scan with `combine` as its region."""
    e = emitter()
    shape = values[0].shape
    if op == "mt.reduce":
        rest = (*shape[:axis], *shape[axis + 1 :])
        types = [block_type(v.dtype, rest) if rest else v.dtype for v in values]
    else:
        types = [v.type for v in values]
    attributes = {"axis": e.i32(axis), **attributes}
    operation, results = e.multi(op, types, values, attributes, regions=1)
    elements = [v.dtype for v in values]
    block, arguments = e.block(operation.regions[0], elements * 2)
    place = e.builder.loc
    with e.inside(block):
        outcome = combine(*arguments)
        outs = outcome if isinstance(outcome, tuple) else (outcome,)
        outs = tuple(to_tensor(e, out, "the result of combine_fn") for out in outs)
        e.builder.loc = place
        if [out.type for out in outs] != elements:
            expected, got = (", ".join(map(str, ts)) for ts in (elements, [o.type for o in outs]))
            raise CombineResult(op.replace("mt.", "tl."), expected, got)
        e.effect("mt.yield", outs)
    e.builder.loc = place
    return results


def fold_axis(value: Tensor, axis: int, combine: Combine) -> Tensor:
    """Reduces one tile along `axis`."""
    return _fold("mt.reduce", [value], axis, combine, {})[0]


def _operands(function: str, input: Any) -> list[Tensor]:
    plain = unwrap(input)
    values = [
        to_tensor(emitter(), v, f"an operand of {function}")
        for v in (plain if isinstance(plain, tuple) else (plain,))
    ]
    for value in values:
        if not value.is_tile:
            raise RankMismatch(function, "a tile", kind_of(value)).about("input")
        if value.shape != values[0].shape:
            raise TypesDiffer(function, str(values[0].type), str(value.type))
    return values


def _reduced(
    function: str, values: list[Tensor], axis: Any, keep_dims: Any, combine: Combine
) -> list[Tensor]:
    """All of `values` along `axis` (None: over everything), dimensions kept on request."""
    e = emitter()
    rank = len(values[0].shape)
    keep = constants.flag(keep_dims, "keep_dims")
    if unwrap(axis) is None:
        while segments(shape := values[0].shape) != segments([prod(shape)]):  # cannot be one row
            values = _fold("mt.reduce", values, len(shape) - 1, combine, {})
        values, position, kept = [ravel(v) for v in values], 0, (1,) * rank
    else:
        position = constants.axis(axis, rank)
        shape = values[0].shape
        kept = (*shape[:position], 1, *shape[position + 1 :])
    results = _fold("mt.reduce", values, position, combine, {})
    if not keep:
        return results
    if not results[0].is_tile:
        return [arithmetic.broadcast_to(e, r, kept) for r in results]
    return [arithmetic.expand_dims(e, r, position) for r in results]


@builtin
def reduce(input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False) -> Any:
    """Folds a tile, or a tuple of tiles of one shape, along `axis` with a jit function.

    `combine_fn` takes the scalars (a..., b...) and returns as many; it must be associative.
    """
    values = _operands("tl.reduce", input)
    e = emitter()
    results = _reduced("tl.reduce", values, axis, keep_dims, lambda *args: e.call(combine_fn, args))
    return tuple(results) if isinstance(input, tuple) else results[0]


def _reduce_one(
    function: str,
    input: Any,
    axis: Any,
    keep_dims: Any,
    combine: Combine,
    widen: Callable[[Tensor], Tensor],
) -> Tensor:
    (value,) = _operands(function, input)
    return _reduced(function, [widen(value)], axis, keep_dims, combine)[0]


def _sum_operand(value: Tensor, dtype: Any) -> Tensor:
    wanted = unwrap(dtype)
    if value.dtype.is_ptr():
        raise WrongDtype("a sum", str(value.type), "numbers")
    target = sum_type(value.dtype) if wanted is None else constants.element_type(wanted)
    return cast(emitter(), value, target)


def _extreme_operand(value: Tensor) -> Tensor:
    """Extremes of narrow floats are found in fp32, of narrow integers in 32 bits."""
    if value.dtype.is_ptr():
        raise WrongDtype("a reduction", str(value.type), "numbers")
    if value.dtype.bits >= 32:
        return value
    wide = dtypes.float32 if value.dtype.is_floating() else sum_type(value.dtype)
    return cast(emitter(), value, wide)


@builtin
def sum(input: Any, axis: Any = None, keep_dims: Any = False, dtype: Any = None) -> Tensor:
    """Sum along `axis` (None: of everything). Integers below 32 bits are summed in 32."""
    return _reduce_one(
        "tl.sum", input, axis, keep_dims, lambda a, b: arithmetic.add(emitter(), a, b),
        lambda value: _sum_operand(value, dtype),
    )  # fmt: skip


@builtin
def xor_sum(input: Any, axis: Any = None, keep_dims: Any = False) -> Tensor:
    """Exclusive or of integers along `axis`."""
    return _bitwise_reduction("tl.xor_sum", input, axis, keep_dims, arithmetic.xor)


@builtin
def reduce_or(input: Any, axis: Any = None, keep_dims: Any = False) -> Tensor:
    """Bitwise or of integers along `axis`."""
    return _bitwise_reduction("tl.reduce_or", input, axis, keep_dims, arithmetic.or_)


def _bitwise_reduction(
    function: str, input: Any, axis: Any, keep_dims: Any, rule: Callable[..., Tensor]
) -> Tensor:
    def checked(value: Tensor) -> Tensor:
        if not value.dtype.is_int():
            raise WrongDtype(function, str(value.type), "integers")
        return value

    combine = lambda a, b: rule(emitter(), a, b)  # noqa: E731
    return _reduce_one(function, input, axis, keep_dims, combine, checked)


@builtin
def max(
    input: Any,
    axis: Any = None,
    return_indices: Any = False,
    return_indices_tie_break_left: Any = True,
    keep_dims: Any = False,
) -> Any:
    """Largest element along `axis`, with its index on request; NaN is ignored."""
    if constants.flag(return_indices, "return_indices"):
        return _with_index("tl.max", input, axis, return_indices_tie_break_left, keep_dims, ">")
    return _reduce_one("tl.max", input, axis, keep_dims, lang_math.maximum, _extreme_operand)


@builtin
def min(
    input: Any,
    axis: Any = None,
    return_indices: Any = False,
    return_indices_tie_break_left: Any = True,
    keep_dims: Any = False,
) -> Any:
    """Smallest element along `axis`, with its index on request; NaN is ignored."""
    if constants.flag(return_indices, "return_indices"):
        return _with_index("tl.min", input, axis, return_indices_tie_break_left, keep_dims, "<")
    return _reduce_one("tl.min", input, axis, keep_dims, lang_math.minimum, _extreme_operand)


@builtin
def argmax(
    input: Any, axis: Any = None, tie_break_left: Any = True, keep_dims: Any = False
) -> Tensor:
    """Index of the largest element along `axis`: int32, the first of equals by default."""
    return _with_index("tl.argmax", input, axis, tie_break_left, keep_dims, ">")[1]


@builtin
def argmin(
    input: Any, axis: Any = None, tie_break_left: Any = True, keep_dims: Any = False
) -> Tensor:
    """Index of the smallest element along `axis`: int32, the first of equals by default."""
    return _with_index("tl.argmin", input, axis, tie_break_left, keep_dims, "<")[1]


def _with_index(
    function: str, input: Any, axis: Any, tie_break_left: Any, keep_dims: Any, operator: str
) -> tuple[Tensor, Tensor]:
    e = emitter()
    (value,) = _operands(function, input)
    if value.dtype.is_ptr():
        raise WrongDtype(function, str(value.type), "numbers")
    if value.dtype == dtypes.bfloat16:
        value = cast(e, value, dtypes.float32)
    shape = value.shape
    if unwrap(axis) is None:
        keep = constants.flag(keep_dims, "keep_dims")
        best, index = _with_index(function, ravel(value), 0, tie_break_left, False, operator)
        if keep:
            ones = (1,) * len(shape)
            return arithmetic.broadcast_to(e, best, ones), arithmetic.broadcast_to(e, index, ones)
        return best, index
    position = constants.axis(axis, len(shape))
    bounds = {"start": e.i32(0), "end": e.i32(shape[position])}
    index = e.op("mt.make_range", block_type(dtypes.int32, (shape[position],)), (), bounds)
    for dim in range(len(shape)):
        if dim != position:
            index = arithmetic.expand_dims(e, index, dim)
    index = arithmetic.broadcast_to(e, index, shape)
    left = constants.flag(tie_break_left, "tie_break_left")

    def combine(a: Tensor, i: Tensor, b: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        first = arithmetic.compare(e, a, b, operator)
        if left:
            tie = arithmetic.compare(e, a, b, "==")
            earlier = arithmetic.compare(e, i, j, "<")
            first = arithmetic.or_(e, first, arithmetic.and_(e, tie, earlier))
        return arithmetic.select(e, first, a, b), arithmetic.select(e, first, i, j)

    results = _reduced(function, [value, index], position, keep_dims, combine)
    return results[0], results[1]


@builtin
def associative_scan(input: Any, axis: Any, combine_fn: Any, reverse: Any = False) -> Any:
    """Inclusive prefix fold of a tile or a tuple of tiles along `axis` with a jit function."""
    values = _operands("tl.associative_scan", input)
    e = emitter()
    results = _scan(values, axis, lambda *args: e.call(combine_fn, args), reverse)
    return tuple(results) if isinstance(input, tuple) else results[0]


def _scan(values: list[Tensor], axis: Any, combine: Combine, reverse: Any) -> list[Tensor]:
    backwards = emitter().boolean(constants.flag(reverse, "reverse"))
    position = constants.axis(axis, len(values[0].shape))
    return _fold("mt.scan", values, position, combine, {"reverse": backwards})


def _cumulative(
    function: str, input: Any, axis: Any, reverse: Any, dtype: Any, rule: Callable[..., Tensor]
) -> Tensor:
    (value,) = _operands(function, input)
    if value.dtype == dtypes.bfloat16 and unwrap(dtype) is None:
        value = cast(emitter(), value, dtypes.float32)
    value = _sum_operand(value, dtype)
    return _scan([value], axis, lambda a, b: rule(emitter(), a, b), reverse)[0]


@builtin
def cumsum(input: Any, axis: Any = 0, reverse: Any = False, dtype: Any = None) -> Tensor:
    """Inclusive prefix sums along `axis`; bf16 is summed in fp32, narrow integers in 32 bits."""
    return _cumulative("tl.cumsum", input, axis, reverse, dtype, arithmetic.add)


@builtin
def cumprod(input: Any, axis: Any = 0, reverse: Any = False) -> Tensor:
    """Inclusive prefix products along `axis`, in the types of cumsum."""
    return _cumulative("tl.cumprod", input, axis, reverse, None, arithmetic.mul)
