"""Sums of products of a kernel's arguments as plain data: [[coefficient, [numbers]], ...]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Terms = Sequence[Sequence[Any]]


def evaluate(terms: Terms, values: Sequence[int]) -> int:
    """The sum, with values[n] for argument n."""
    total = 0
    for coefficient, numbers in terms:
        for number in numbers:
            coefficient *= values[number]
        total += coefficient
    return total
