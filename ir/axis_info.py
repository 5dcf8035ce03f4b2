"""Facts about the values of a tile along each of its dimensions, and how they combine.

For dimension d of a tile (a scalar counts as one dimension of size 1), all powers of two:
contiguity c: along d every aligned group of c elements is x, x+1, ..., x+c-1 (pointers: in steps
of the pointee's size); divisibility v: the first element of every such group is a multiple of v
(pointers: address in bytes); constancy k: along d every aligned group of k elements is equal.
"""

from __future__ import annotations

from dataclasses import dataclass

from minitriton.ir.linear_layout import hull

MAX_DIVISIBILITY = 1 << 40


@dataclass(frozen=True, slots=True)
class AxisInfo:
    """One entry per dimension; `constant` is the value of every element where it is known.

    `unit`: what one element step adds: 1 for numbers, the pointee's bytes for pointers.
    """

    contiguity: tuple[int, ...]
    divisibility: tuple[int, ...]
    constancy: tuple[int, ...]
    constant: int | None = None
    unit: int = 1

    @property
    def rank(self) -> int:
        return len(self.contiguity)

    def multiple_at(self, dim: int, group: int) -> int:
        """What the elements at multiples of `group` along `dim` are multiples of."""
        contiguity, divisibility = self.contiguity[dim], self.divisibility[dim]
        if group >= contiguity:
            return divisibility
        return min(divisibility, group * self.unit)

    def everywhere(self) -> int:
        """What all elements are multiples of."""
        return max(self.multiple_at(dim, 1) for dim in range(self.rank))

    def aligned_run(self, dim: int) -> int:
        """Largest g: groups of g along `dim` are contiguous and start at a multiple of g."""
        return max(1, min(self.contiguity[dim], self.divisibility[dim] // self.unit))

    @staticmethod
    def unknown(rank: int, unit: int = 1) -> AxisInfo:
        """No facts at all."""
        ones = (1,) * rank
        return AxisInfo(ones, ones, ones, None, unit)

    @staticmethod
    def of_constant(value: int, shape: tuple[int, ...]) -> AxisInfo:
        """Every element of a tile of `shape` is `value`."""
        whole = tuple(map(hull, shape))
        return AxisInfo((1,) * len(shape), (power_of_two_in(value),) * len(shape), whole, value)

    def meet(self, other: AxisInfo) -> AxisInfo:
        """What holds for values that may be either."""
        contiguity = tuple(map(min, self.contiguity, other.contiguity))
        return AxisInfo(
            contiguity,
            tuple(
                min(self.multiple_at(d, c), other.multiple_at(d, c))
                for d, c in enumerate(contiguity)
            ),
            tuple(map(min, self.constancy, other.constancy)),
            self.constant if self.constant == other.constant else None,
            self.unit,
        )


def power_of_two_in(value: int) -> int:
    """Largest power of two that divides `value` (capped; 0 is a multiple of everything)."""
    return min(value & -value, MAX_DIVISIBILITY) if value else MAX_DIVISIBILITY


def add(lhs: AxisInfo, rhs: AxisInfo) -> AxisInfo:
    """lhs + rhs, where rhs counts elements of size lhs.unit."""
    rhs = _in_units(rhs, lhs.unit)
    contiguity = tuple(
        max(min(lc, rk), min(rc, lk))
        for lc, lk, rc, rk in zip(
            lhs.contiguity, lhs.constancy, rhs.contiguity, rhs.constancy, strict=True
        )
    )
    return _sum(lhs, rhs, contiguity, 1)


def subtract(lhs: AxisInfo, rhs: AxisInfo) -> AxisInfo:
    """lhs - rhs of numbers."""
    return _sum(lhs, rhs, tuple(map(min, lhs.contiguity, rhs.constancy)), -1)


def _sum(lhs: AxisInfo, rhs: AxisInfo, contiguity: tuple[int, ...], sign: int) -> AxisInfo:
    divisibility = tuple(
        min(lhs.multiple_at(d, c), rhs.multiple_at(d, c)) for d, c in enumerate(contiguity)
    )
    constant = None
    if lhs.constant is not None and rhs.constant is not None:
        constant = lhs.constant + sign * rhs.constant
    constancy = tuple(map(min, lhs.constancy, rhs.constancy))
    return AxisInfo(contiguity, divisibility, constancy, constant, lhs.unit)


def _in_units(info: AxisInfo, unit: int) -> AxisInfo:
    if unit == info.unit:
        return info
    scaled = tuple(min(v * unit, MAX_DIVISIBILITY) for v in info.divisibility)
    return AxisInfo(info.contiguity, scaled, info.constancy, None, unit)


def multiply(lhs: AxisInfo, rhs: AxisInfo) -> AxisInfo:
    """lhs * rhs."""
    if rhs.constant == 1:
        return lhs
    if lhs.constant == 1:
        return rhs
    divisibility = tuple(
        min(lhs.multiple_at(d, 1) * rhs.multiple_at(d, 1), MAX_DIVISIBILITY)
        for d in range(lhs.rank)
    )
    constant = None
    if lhs.constant is not None and rhs.constant is not None:
        constant = lhs.constant * rhs.constant
    constancy = tuple(map(min, lhs.constancy, rhs.constancy))
    return AxisInfo((1,) * lhs.rank, divisibility, constancy, constant)


def _common_run(lhs: AxisInfo, rhs: AxisInfo, dim: int) -> int:
    """Largest g: in groups of g, lhs is x..x+g-1 with g | x, and rhs is one multiple of g."""
    return min(lhs.aligned_run(dim), rhs.constancy[dim], rhs.multiple_at(dim, 1))


def divide(lhs: AxisInfo, rhs: AxisInfo) -> AxisInfo:
    """lhs // rhs; like Triton, takes the dividend of a signed division as not negative."""
    if rhs.constant == 1:
        return lhs
    constancy = tuple(
        max(min(lk, rk), _common_run(lhs, rhs, d))
        for d, (lk, rk) in enumerate(zip(lhs.constancy, rhs.constancy, strict=True))
    )
    divisor = rhs.constant or 0
    exact = divisor > 0 and divisor == power_of_two_in(divisor)
    divisibility = tuple(
        max(1, lhs.multiple_at(d, 1) // divisor) if exact else 1 for d in range(lhs.rank)
    )
    return AxisInfo((1,) * lhs.rank, divisibility, constancy)


def remainder(lhs: AxisInfo, rhs: AxisInfo) -> AxisInfo:
    """lhs % rhs; like Triton, takes the dividend of a signed remainder as not negative."""
    contiguity = tuple(_common_run(lhs, rhs, d) for d in range(lhs.rank))
    divisibility = tuple(
        min(lhs.multiple_at(d, c), rhs.multiple_at(d, 1)) for d, c in enumerate(contiguity)
    )
    return AxisInfo(contiguity, divisibility, tuple(map(min, lhs.constancy, rhs.constancy)))


def bit_and(lhs: AxisInfo, rhs: AxisInfo) -> AxisInfo:
    """lhs & rhs: a mask of low bits is a remainder, else trailing zeros add up."""
    for value, mask in ((lhs, rhs), (rhs, lhs)):
        if mask.constant is not None and mask.constant > 0:
            size = mask.constant + 1
            if size & mask.constant == 0:
                return remainder(value, AxisInfo.of_constant(size, mask.constancy))
    divisibility = tuple(max(lhs.multiple_at(d, 1), rhs.multiple_at(d, 1)) for d in range(lhs.rank))
    constancy = tuple(map(min, lhs.constancy, rhs.constancy))
    return AxisInfo((1,) * lhs.rank, divisibility, constancy)


def pointwise(lhs: AxisInfo, rhs: AxisInfo) -> AxisInfo:
    """Some function of both whose result keeps their common trailing zeros: or, xor, min, max."""
    divisibility = tuple(min(lhs.multiple_at(d, 1), rhs.multiple_at(d, 1)) for d in range(lhs.rank))
    constancy = tuple(map(min, lhs.constancy, rhs.constancy))
    return AxisInfo((1,) * lhs.rank, divisibility, constancy, None, lhs.unit)


def select(condition: AxisInfo | None, lhs: AxisInfo, rhs: AxisInfo) -> AxisInfo:
    """condition ? lhs : rhs; None for a scalar condition."""
    both = lhs.meet(rhs)
    if condition is None:
        return both
    contiguity = tuple(map(min, both.contiguity, condition.constancy))
    divisibility = tuple(
        min(lhs.multiple_at(d, c), rhs.multiple_at(d, c)) for d, c in enumerate(contiguity)
    )
    constancy = tuple(map(min, both.constancy, condition.constancy))
    return AxisInfo(contiguity, divisibility, constancy, both.constant, lhs.unit)


# arith.cmpi predicates by number: where a run below a boundary stays on one side of it
_RUN_ON_LEFT = frozenset({2, 5, 6, 9})  # x < b, x >= b, signed and unsigned
_RUN_ON_RIGHT = frozenset({3, 4, 7, 8})  # b <= x, b > x


def compare(lhs: AxisInfo, rhs: AxisInfo, predicate: int) -> AxisInfo:
    """An i1: constant over groups where `x < bound` cannot change."""
    constancy = list(map(min, lhs.constancy, rhs.constancy))
    for d in range(lhs.rank):
        if predicate in _RUN_ON_LEFT:
            constancy[d] = max(constancy[d], _common_run(lhs, rhs, d))
        elif predicate in _RUN_ON_RIGHT:
            constancy[d] = max(constancy[d], _common_run(rhs, lhs, d))
    ones = (1,) * lhs.rank
    return AxisInfo(ones, ones, tuple(constancy))
