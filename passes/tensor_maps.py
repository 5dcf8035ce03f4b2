"""Which loads and stores can be TMA copies: boxes of a tensor that the launcher can describe.

A tensor map holds an argument's address, and sizes and strides of up to five dimensions; the copy
gives the coordinates of its first element, and elements outside the sizes arrive as zeros (or NaN),
or are not stored. So the address must be base + sum_d stride_d (coordinate_d + index_d) with
strides that depend on arguments alone, and the mask must say exactly what the sizes say. `plan`
proves both, or says what is amiss. Two proofs end at launch, in the memory of the argument:

Elements that nobody sees (`unobserved`), as rows past the end of a group whose length is loaded,
may arrive as anything. Then the outermost dimension ends where that memory does, so that copies
stay inside; every element that the mask lets through is there, or the load has no meaning.

A loaded coordinate of the outermost dimension may be negative, which is no mistake where no element
is read (an empty group) or where the argument points into the middle of its memory. At launch no
memory may be at index -1: then the load has a meaning only where its mask lets nothing through or
the coordinate is not negative, and that fill, or what nobody sees, is right as well. For this the
sizes of the other dimensions must be known, as an index there could make up for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from minitriton.ir.axis_analysis import AxisFacts, mask_of
from minitriton.ir.mlir import ir
from minitriton.passes.affine import (
    ONE,
    ZERO,
    Affine,
    AffineAnalysis,
    Monomial,
    Polynomial,
    Wrap,
    bounds_of,
)
from minitriton.passes.traversal import Value, fills_with_nan, fills_with_zero
from minitriton.passes.unobserved import unobserved

MAX_RANK = 5
MAX_BOX = 256  # elements along a dimension of a box
MIN_NAN_BYTES = 2  # of elements that may be filled with NaN: a map takes fp8 for bytes
STRIDE_BYTES = 16  # strides and the base are multiples of this


class NotAffine(Exception):
    """The access has no tensor map; the message says why."""


@dataclass(frozen=True)
class MapDim:
    """A dimension of the tensor: stride and size from arguments alone (size None: no end known),
    and the coordinate of the copy's first element; `tile_dim` is the tile's, if it is one; `spans`:
    it ends where the argument's memory does."""

    stride: Polynomial
    size: Polynomial | None
    coordinate: Polynomial
    tile_dim: int | None
    spans: bool = False


@dataclass(frozen=True)
class MapPlan:
    """base: number of an argument; offset: elements from there, from arguments alone; dims: inner
    first; non_negative: arguments that must not be negative; signed: the last coordinate may be;
    fill: what is outside ("zero", "nan")."""

    base: int
    offset: Polynomial
    dims: tuple[MapDim, ...]
    non_negative: frozenset[int] = field(default=frozenset())
    signed: bool = False
    fill: str = "zero"

    @property
    def places(self) -> list[int]:
        """The map's dimension of each of the tile's."""
        found = {d.tile_dim: n for n, d in enumerate(self.dims) if d.tile_dim is not None}
        return [found[dim] for dim in range(len(found))]


def plan(
    op: ir.Operation, order: Sequence[int], size: int, analysis: AffineAnalysis, facts: AxisFacts
) -> MapPlan:
    """The tensor map of a load or store of elements of `size` bytes; order: its dims, fastest
    first.

    Raises NotAffine.
    """
    return _Planner(op, order, size, analysis, facts).plan()


class _Planner:
    def __init__(
        self, access: ir.Operation, order: Sequence[int], size: int, analysis: AffineAnalysis,
        facts: AxisFacts,
    ) -> None:  # fmt: skip
        self._access, self._order, self._size = access, list(order), size
        self._analysis, self._facts = analysis, facts

    def plan(self) -> MapPlan:
        address = self._analysis.of(self._access.operands[0])
        if address is None or address.base is None:
            raise NotAffine("its addresses are not an argument plus an affine function")
        fill = self._fill()
        self._check_strides(address)
        upper, lower = self._bounds(address)
        spanning = {dim for dim in upper if self._spans(dim, upper[dim], lower)}
        for dim in spanning:
            del upper[dim]
        rest, found = address.scalar, {}
        # bounded dimensions first: no choice there; without a bound the widest stride takes first
        for dim in sorted(self._order, key=lambda d: (d not in upper, -self._order.index(d))):
            stride, end = address.dims[dim], upper.get(dim)
            coordinate = self._coordinate(dim, stride, rest, end, lower.get(dim))
            rest = rest - stride * coordinate
            size = None if end is None else end + coordinate
            found[dim] = MapDim(stride, size, coordinate, dim, dim in spanning)
        rest, outer = self._outer(rest, self._analysis.entry_argument(address.base))
        dims = [*(found[dim] for dim in self._order), *outer]
        if len(dims) > MAX_RANK:
            raise NotAffine(f"it would take a tensor map of rank {len(dims)}")
        if len(dims) < 2:
            raise NotAffine("it has one dimension, and swizzled tensor maps have two or more")
        if self._access.name == "mt.store":
            self._check_ends(found[self._order[0]])
        if spanning and not (dims[-1].spans and self._is_outermost(dims)):
            raise NotAffine("where a dimension ends does not come from arguments alone")
        arguments = {n for wrap in address.wraps for n in wrap.non_negative}
        signed = False
        for made in dims:
            if made.tile_dim not in lower and not self._analysis.non_negative(
                made.coordinate, arguments
            ):
                signed = made is dims[-1] and self._is_outermost(dims)
                if not signed:
                    raise NotAffine("a coordinate may be negative")
        return MapPlan(address.base, rest, tuple(dims), frozenset(arguments), signed, fill)

    def _spans(self, dim: int, end: Polynomial, lower: dict[int, Polynomial]) -> bool:
        """Whether a dimension may as well end where memory does: the mask ends it at a number that
        no tensor map can have, and nobody sees what lies beyond."""
        start = self._start(end)
        if dim in lower or dim == self._order[0] or self._analysis.non_negative(start, set()):
            return False
        return self._access.name == "mt.load" and unobserved(
            self._access.results[0], dim, end, self._analysis
        )

    def _is_outermost(self, dims: Sequence[MapDim]) -> bool:
        """Whether the last dimension of a load is around the others, as far as sizes and strides
        tell before the launch."""
        *inner, last = dims
        return self._access.name == "mt.load" and all(
            made.size is not None and made.stride != last.stride for made in inner
        )

    def _fill(self) -> str:
        """What a load gives where its mask is false."""
        if self._access.name == "mt.store" or fills_with_zero(self._access):
            return "zero"
        if not fills_with_nan(self._access):
            raise NotAffine("masked elements are neither zero nor NaN")
        if self._size < MIN_NAN_BYTES:
            raise NotAffine("it has no NaN for elements of 8 bits")
        return "nan"

    def _check_strides(self, address: Affine) -> None:
        inner, *outer = self._order
        if address.dims[inner] != ONE:
            raise NotAffine(f"elements along dimension {inner} are not known to be adjacent")
        for dim in outer:
            if not self._from_arguments(address.dims[dim]):
                raise NotAffine(f"the stride of dimension {dim} does not come from arguments alone")
            if not self._divisible(address.dims[dim]):
                raise NotAffine(f"the stride of dimension {dim} is not a proved multiple of 16 B")

    def _check_ends(self, inner: MapDim) -> None:
        """TMA writes whole 16 bytes (seen on an H200), also those that begin before the end."""
        for value, what in ((inner.coordinate, "begins"), (inner.size, "ends")):
            if value is not None and not self._divisible(value):
                dim = inner.tile_dim
                where = f"where it {what} along dimension {dim}"
                raise NotAffine(f"{where} is not a proved multiple of 16 B")

    def _bounds(self, address: Affine) -> tuple[dict[int, Polynomial], dict[int, Polynomial]]:
        """(ends, starts) of the index along each dimension that the access is confined to."""
        upper: dict[int, Polynomial] = {}
        lower: dict[int, Polynomial] = {}
        mask = mask_of(self._access)
        if mask is not None:
            found = bounds_of(mask, self._analysis)
            if found is None:
                raise NotAffine("its mask is not a box of coordinates")
            for dim, limit, is_upper in found:
                side = upper if is_upper else lower
                if side.setdefault(dim, limit) != limit:
                    raise NotAffine(f"its mask bounds dimension {dim} twice")
        for wrap in address.wraps:
            self._check_wrap(wrap, upper)
            if upper.setdefault(wrap.dim, wrap.bound) != wrap.bound:
                raise NotAffine(f"its mask bounds dimension {wrap.dim} beside a `%` or `where`")
        return upper, lower

    def _check_wrap(self, wrap: Wrap, upper: dict[int, Polynomial]) -> None:
        """That no element beyond the bound counts: it is masked off, or nobody sees it."""
        if upper.get(wrap.dim) == wrap.bound:
            return
        if self._access.name == "mt.store":
            raise NotAffine(
                f"elements that `%` or `where` moves along dimension {wrap.dim} are stored"
            )
        if not unobserved(self._access.results[0], wrap.dim, wrap.bound, self._analysis):
            raise NotAffine(
                f"elements that `%` or `where` moves along dimension {wrap.dim} may be used"
            )

    def _coordinate(
        self, dim: int, stride: Polynomial, rest: Polynomial, end: Polynomial | None,
        start: Polynomial | None,
    ) -> Polynomial:  # fmt: skip
        """Of the first element along `dim`: where a mask starts it is 0 there; else what makes the
        size, end + coordinate, depend on arguments alone; without an end, all of the address that
        the stride divides."""
        if start is not None:
            coordinate = ZERO - start
        elif end is None:
            coordinate = _quotient(rest, stride, self._analysis)
            return self._inside(coordinate, _whole_strides(rest, stride))
        else:
            coordinate = self._start(end)
        if end is not None and not self._from_arguments(end + coordinate):
            raise NotAffine(f"where dimension {dim} ends does not come from arguments alone")
        return coordinate

    def _start(self, end: Polynomial) -> Polynomial:
        """The coordinate with which an end depends on arguments alone."""
        start = Polynomial({m: -c for m, c in end.terms.items() if not self._constant_term(m)})
        return self._inside(start, -end.terms.get((), 0))

    def _inside(self, coordinate: Polynomial, constant: int) -> Polynomial:
        """`coordinate` with the constant that else goes to the map's base, if that put it before
        the tensor: programs that count down. The GPU may look there for boxes that lie outside."""
        if constant < 0:
            lower = coordinate + Polynomial({(): constant})
            if self._analysis.non_negative(lower, set()):
                return lower
        return coordinate

    def _outer(self, rest: Polynomial, base: Value) -> tuple[Polynomial, list[MapDim]]:
        """What is left of the address as further dimensions (batch, head, ...) and an offset."""
        offset = Polynomial()
        by_stride: dict[Monomial, Polynomial] = {}
        for monomial, coefficient in rest.terms.items():
            fixed = tuple(a for a in monomial if self._analysis.argument(a) is not None)
            if fixed == monomial:
                offset = offset + Polynomial({monomial: coefficient})
                continue
            varying = tuple(a for a in monomial if a not in fixed)
            term = Polynomial({varying: coefficient})
            by_stride[fixed] = by_stride.get(fixed, Polynomial()) + term
        dims = []
        for fixed, coordinate in by_stride.items():
            amount = offset.terms.get(fixed, 0)
            inside = self._inside(coordinate, amount)
            if inside != coordinate:
                coordinate, offset = inside, offset - Polynomial({fixed: amount})
            unit = STRIDE_BYTES // self._size
            stride, scaled = Polynomial({fixed: 1}), coordinate
            if not self._divisible(stride):  # a constant factor may help
                whole = coordinate.divided(unit)
                if whole is None:
                    raise NotAffine("an offset is not a proved multiple of 16 B")
                stride, scaled = Polynomial({fixed: unit}), whole
            dims.append(MapDim(stride, None, scaled, None))
        if not self._divisible(offset) or self._facts.of(base).divisibility[0] % STRIDE_BYTES:
            raise NotAffine("the address of the first element is not a proved multiple of 16 B")
        return offset, dims

    def _constant_term(self, monomial: Monomial) -> bool:
        return all(self._analysis.argument(a) is not None for a in monomial)

    def _from_arguments(self, value: Polynomial) -> bool:
        return all(map(self._constant_term, value.terms))

    def _divisible(self, value: Polynomial) -> bool:
        """Whether so many elements are a multiple of 16 bytes, by what is known of arguments."""
        for monomial, coefficient in value.terms.items():
            known = abs(coefficient) * self._size
            for atom in monomial:
                known *= max(self._facts.of(v).everywhere() for v in self._analysis.names[atom])
            if known % STRIDE_BYTES:
                return False
        return True


def _quotient(rest: Polynomial, stride: Polynomial, analysis: AffineAnalysis) -> Polynomial:
    """The terms of `rest` that are `stride` (one term) times something, without it; for a stride of
    one those without arguments, as an argument in a product is another dimension's stride."""
    if len(stride.terms) != 1:
        return ZERO
    ((divisor, factor),) = stride.terms.items()
    found: dict[Monomial, int] = {}
    for monomial, coefficient in rest.terms.items():
        left = _without(monomial, divisor)
        if left is None or coefficient % factor:
            continue
        is_plain = all(analysis.argument(a) is None for a in left)
        if is_plain if stride == ONE else left:
            found[left] = coefficient // factor
    return Polynomial(found)


def _whole_strides(rest: Polynomial, stride: Polynomial) -> int:
    """How many times `stride` (one term) `rest` has."""
    if len(stride.terms) != 1:
        return 0
    ((divisor, factor),) = stride.terms.items()
    times, left = divmod(rest.terms.get(divisor, 0), factor)
    return 0 if left else times


def _without(monomial: Monomial, divisor: Monomial) -> Monomial | None:
    """`monomial` over `divisor`; None where that is no monomial."""
    left = list(monomial)
    for atom in divisor:
        if atom not in left:
            return None
        left.remove(atom)
    return tuple(left)
