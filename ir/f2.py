"""Linear algebra over F2 on vectors stored as Python ints (bit i = component i).

Layouts are F2-linear maps with at most a few dozen columns, so plain integers and
elimination on the leading bit beat any matrix library here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Span:
    """A growing span of vectors that remembers how each member was combined from the inputs."""

    def __init__(self, vectors: Iterable[int] = ()) -> None:
        self._rows: dict[int, tuple[int, int]] = {}
        self._count = 0
        for vector in vectors:
            self.add(vector)

    def reduce(self, vector: int) -> tuple[int, int]:
        """Return (residual, combination of inputs removed); a residual of 0 means membership."""
        combination = 0
        while vector:
            row = self._rows.get(vector.bit_length())
            if row is None:
                break
            vector ^= row[0]
            combination ^= row[1]
        return vector, combination

    def add(self, vector: int) -> bool:
        """Append an input vector; True where it was independent of the earlier ones."""
        residual, combination = self.reduce(vector)
        own = 1 << self._count
        self._count += 1
        if residual:
            self._rows[residual.bit_length()] = (residual, combination ^ own)
        return bool(residual)

    def __contains__(self, vector: int) -> bool:
        return self.reduce(vector)[0] == 0

    def solve(self, target: int) -> int | None:
        """A mask of input vectors whose XOR is `target`, or None where there is none."""
        residual, combination = self.reduce(target)
        return None if residual else combination

    @property
    def rank(self) -> int:
        return len(self._rows)


def rank(vectors: Iterable[int]) -> int:
    """Dimension of the span."""
    return Span(vectors).rank


def combine(vectors: Sequence[int], mask: int) -> int:
    """XOR of the vectors whose index is set in `mask`."""
    result = 0
    while mask:
        low = mask & -mask
        result ^= vectors[low.bit_length() - 1]
        mask ^= low
    return result


def span_elements(vectors: Sequence[int]) -> list[int]:
    """All 2^n combinations, entry m being the XOR of the vectors selected by the bits of m."""
    elements = [0]
    for vector in vectors:
        elements += [element ^ vector for element in elements]
    return elements


def independent(vectors: Iterable[int], modulo: Iterable[int] = ()) -> list[int]:
    """The subsequence of `vectors` independent of `modulo` and of the ones kept before."""
    span = Span(modulo)
    return [vector for vector in vectors if span.add(vector)]


def complement(vectors: Iterable[int], num_bits: int) -> list[int]:
    """Unit vectors that complete the span of `vectors` to the whole space of `num_bits`."""
    return independent((1 << bit for bit in range(num_bits)), modulo=vectors)


def intersection(left: Iterable[int], right: Iterable[int]) -> list[int]:
    """A basis of span(left) intersected with span(right)."""
    left = independent(left)
    right = independent(right)
    span = Span(left)
    left_mask = (1 << len(left)) - 1
    common = []
    for vector in right:
        residual, combination = span.reduce(vector)
        span.add(vector)
        if residual == 0:
            common.append(combine(left, combination & left_mask))
    return common
