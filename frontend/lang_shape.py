"""Functions of the language that rearrange tiles."""

from __future__ import annotations

from math import prod
from typing import Any

from minitriton.frontend import arithmetic, constants
from minitriton.frontend.active import builtin, emitter
from minitriton.frontend.casting import to_tensor
from minitriton.frontend.errors import kind_of
from minitriton.frontend.errors_semantic import (
    BadPermutation,
    ElementCount,
    RaggedReshape,
    RankMismatch,
    TypesDiffer,
)
from minitriton.frontend.values import Tensor, is_number, unwrap
from minitriton.ir.dtypes import block_type
from minitriton.ir.linear_layout import granule, hull, segments


def tile(function: str, value: Any) -> Tensor:
    """`value` if it is a tile."""
    if not isinstance(value, Tensor) or not value.is_tile:
        raise RankMismatch(function, "a tile", kind_of(value))
    return value


def _dims(first: Any, rest: tuple[Any, ...]) -> tuple[Any, ...]:
    """Dimensions given one by one or as one tuple."""
    plain = unwrap(first)
    if isinstance(plain, tuple | list):
        return tuple(plain)
    return (plain, *rest)


@builtin
def reshape(input: Any, *shape: Any, can_reorder: Any = False) -> Tensor:
    """The same elements in C order in another shape (given as a tuple or one by one)."""
    e = emitter()
    value = to_tensor(e, input)
    dims = _dims(shape[0], shape[1:]) if shape else ()
    known = [constants.integer(d, "each dimension of a shape") for d in dims]
    if known.count(-1) == 1:
        known[known.index(-1)] = prod(value.shape) // max(prod(d for d in known if d != -1), 1)
    target = constants.shape(tuple(known))
    if prod(target) != prod(value.shape):
        raise ElementCount(str(list(value.shape)), str(list(target)))
    if segments(target) != segments(value.shape):
        raise RaggedReshape(str(list(value.shape)), str(list(target)))
    if target == value.shape:
        return value
    if not value.is_tile:
        return arithmetic.broadcast_to(e, value, target)
    return _reshaped(value, target) if target else item(value)


def _reshaped(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tile in another shape of the same segments."""
    if shape == value.shape:
        return value
    return emitter().op("mt.reshape", block_type(value.dtype, shape), [value])


@builtin
def view(input: Any, *shape: Any) -> Tensor:
    """The same as reshape."""
    return reshape(input, *shape)


@builtin
def ravel(x: Any, can_reorder: Any = False) -> Tensor:
    """All elements in C order, whatever `can_reorder` allows, as a tile of rank 1."""
    value = to_tensor(emitter(), unwrap(x))
    return reshape(value, prod(value.shape))


@builtin
def trans(input: Any, *dims: Any) -> Tensor:
    """Permuted dimensions; without `dims` the last two are swapped."""
    value = tile("tl.trans", input)
    rank = len(value.shape)
    if not dims:
        if rank < 2:
            raise RankMismatch("tl.trans", "a tile of rank 2 or more", kind_of(value))
        return _permute(value, (*range(rank - 2), rank - 1, rank - 2))
    return permute(value, *dims)


@builtin
def permute(input: Any, *dims: Any) -> Tensor:
    """Result dimension i is dimension dims[i] of `input`."""
    value = tile("tl.permute", input)
    rank = len(value.shape)
    given = _dims(dims[0], dims[1:]) if dims else ()
    order = tuple(constants.integer(d, "each of dims") for d in given)
    order = tuple(d % rank if -rank <= d < rank else d for d in order)
    if sorted(order) != list(range(rank)):
        raise BadPermutation(str(list(given)), rank)
    return _permute(value, order)


def _permute(value: Tensor, order: tuple[int, ...]) -> Tensor:
    if order == tuple(range(len(order))):
        return value
    e = emitter()
    type_ = block_type(value.dtype, tuple(value.shape[d] for d in order))
    return e.op("mt.trans", type_, [value], {"order": e.array32(order)})


@builtin
def expand_dims(input: Any, axis: Any) -> Tensor:
    """A dimension of size 1 inserted at `axis` (an int or a tuple of them)."""
    e = emitter()
    value = to_tensor(e, input)
    plain = unwrap(axis)
    axes = tuple(plain) if isinstance(plain, tuple | list) else (plain,)
    rank = len(value.shape) + len(axes)
    for position in sorted(constants.axis(a, rank) for a in axes):
        if value.is_tile:
            value = arithmetic.expand_dims(e, value, position)
        else:
            value = arithmetic.broadcast_to(e, value, (1,))
    return value


@builtin
def squeeze(x: Any, dim: Any) -> Tensor:
    """Removes dimension `dim`, which has size 1."""
    value = tile("tl.squeeze", x)
    axis = constants.axis(dim, len(value.shape), "dim")
    if value.shape[axis] != 1:
        raise RankMismatch("tl.squeeze", f"size 1 in dimension {axis}", kind_of(value))
    return reshape(value, (*value.shape[:axis], *value.shape[axis + 1 :]))


@builtin
def unsqueeze(x: Any, dim: Any) -> Tensor:
    """The same as expand_dims."""
    return expand_dims(x, dim)


@builtin
def item(x: Any) -> Tensor:
    """The only element of a tile as a scalar."""
    value = tile("tl.item", x)
    if prod(value.shape) != 1:
        raise RankMismatch("tl.item", "a tile of one element", kind_of(value))
    from minitriton.frontend.lang_reduce import fold_axis

    flat = value if len(value.shape) == 1 else reshape(value, 1)
    return fold_axis(flat, 0, lambda a, b: a)


@builtin
def broadcast_to(input: Any, *shape: Any) -> Tensor:
    """`input` repeated to `shape`."""
    e = emitter()
    dims = constants.shape(_dims(shape[0], shape[1:]) if shape else ())
    return arithmetic.broadcast_to(e, to_tensor(e, input), dims)


@builtin
def broadcast(input: Any, other: Any) -> tuple[Tensor, ...]:
    """Both in their common shape."""
    e = emitter()
    return tuple(arithmetic.broadcast(e, to_tensor(e, input), to_tensor(e, other)))


def _pair(function: str, a: Any, b: Any) -> tuple[Tensor, Tensor]:
    e = emitter()
    if is_number(a) != is_number(b):
        a, b = arithmetic.operands(e, a, b, function)
    left, right = arithmetic.broadcast(e, to_tensor(e, a), to_tensor(e, b))
    if left.type != right.type:
        raise TypesDiffer(function, str(left.type), str(right.type))
    if not left.is_tile:
        left, right = (arithmetic.broadcast_to(e, x, (1,)) for x in (left, right))
    return left, right


@builtin
def join(a: Any, b: Any) -> Tensor:
    """Stacks two tiles of one type along a new last dimension of size 2."""
    e = emitter()
    scalars = isinstance(a, Tensor) and not a.is_tile and not getattr(b, "is_tile", False)
    left, right = _pair("tl.join", a, b)
    constants.limit((*left.shape, 2))
    result = e.op("mt.join", block_type(left.dtype, (*left.shape, 2)), [left, right])
    return reshape(result, 2) if scalars else result


@builtin
def split(a: Any) -> tuple[Tensor, Tensor]:
    """The two halves of a last dimension of size 2."""
    value = tile("tl.split", a)
    if value.shape[-1] != 2:
        raise RankMismatch("tl.split", "a last dimension of size 2", kind_of(value))
    flat = len(value.shape) == 1
    if flat:
        value = arithmetic.expand_dims(emitter(), value, 0)
    type_ = block_type(value.dtype, value.shape[:-1])
    _, (left, right) = emitter().multi("mt.split", [type_, type_], [value])
    return (item(left), item(right)) if flat else (left, right)


@builtin
def interleave(a: Any, b: Any) -> Tensor:
    """a[0], b[0], a[1], b[1], ... along the last dimension."""
    joined = join(a, b)
    if len(joined.shape) == 1:
        return joined
    return reshape(joined, (*joined.shape[:-2], 2 * joined.shape[-2]))


@builtin
def cat(input: Any, other: Any, can_reorder: Any = False, dim: Any = 0) -> Tensor:
    """Two tiles of one type, one after the other along `dim`."""
    e = emitter()
    left, right = tile("tl.cat", input), tile("tl.cat", other)
    if left.type != right.type:
        raise TypesDiffer("tl.cat", str(left.type), str(right.type))
    axis = constants.axis(dim, len(left.shape), "dim")
    shape = (*left.shape[:axis], 2 * left.shape[axis], *left.shape[axis + 1 :])
    constants.limit(shape)
    attributes = {"axis": e.i32(axis)}
    return e.op("mt.cat", block_type(left.dtype, shape), [left, right], attributes)


@builtin
def flip(x: Any, dim: Any = -1) -> Tensor:
    """The order of dimension `dim` reversed."""
    value = tile("tl.flip", x)
    axis = constants.axis(dim, len(value.shape), "dim")
    before, size, after = value.shape[:axis], value.shape[axis], value.shape[axis + 1 :]
    block = granule(size)
    result = value
    for bit in range(block.bit_length() - 1):  # reversing an index of bits inverts each of them
        lead, tail = _merged((*before, size >> (bit + 1))), _merged((1 << bit, *after))
        first, last = range(len(lead)), range(len(lead) + 1, len(lead) + len(tail) + 1)
        halves = _reshaped(result, (*lead, 2, *tail))
        left, right = split(_permute(halves, (*first, *last, len(lead))))
        end = len(lead) + len(tail)
        result = _permute(join(right, left), (*first, end, *range(len(lead), end)))
    result = _reshaped(result, value.shape)
    if block == size:
        return result
    e = emitter()
    return e.op(
        "mt.flip_blocks", block_type(value.dtype, value.shape), [result], {"axis": e.i32(axis)}
    )


def _merged(dims: tuple[int, ...]) -> tuple[int, ...]:
    """As one dimension, where all are powers of two."""
    return (prod(dims),) if all(dim == hull(dim) for dim in dims) else dims
