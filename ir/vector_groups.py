"""Find groups of registers that hold consecutive elements, for vector memory accesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minitriton.ir import f2


@dataclass(frozen=True)
class VectorGroups:
    """width: elements per vector. groups: register indices in element order, one tuple per
    vector. duplicates: (register, register of a group that holds the same element)."""

    width: int
    groups: tuple[tuple[int, ...], ...]
    duplicates: tuple[tuple[int, int], ...]


def run_bits(registers: Sequence[int], others: Sequence[int], units: Sequence[int]) -> int:
    """Largest k such that register bits 0..k-1 are units 0..k-1 and nothing else touches them.

    registers, others: flat bases of register bits and of lane and warp bits. units: the flat
    index of 1, 2, 4, ... steps along the axis of interest.
    """
    k = 0
    for basis, unit in zip(registers, units, strict=False):
        if basis != unit:
            break
        k += 1
    while k:
        low = sum(units[:k])
        if not any(basis & low for basis in (*registers[k:], *others)):
            break
        k -= 1
    return k


def contiguous_groups(
    registers: Sequence[int], others: Sequence[int], units: Sequence[int], max_bits: int
) -> VectorGroups:
    """The widest aligned vectors that some reordering of the registers gives.

    Like `run_bits` with the register bits recombined freely; at most 2^max_bits wide. Registers
    that repeat an element are left out of the groups and listed as duplicates.
    """
    span = f2.Span(registers)
    used = [bit for bit, basis in enumerate(registers) if basis not in f2.Span(registers[:bit])]
    steps: list[int] = []
    for unit in units[:max_bits]:
        step = span.solve(unit)
        if step is None or any(basis & unit for basis in others):
            break
        steps.append(step)
    low = sum(units[: len(steps)])
    # the remaining register bits, corrected to leave the position inside a vector alone
    occupied = f2.Span(steps)
    rest = []
    for bit in used:
        if occupied.add(1 << bit):
            inside = [i for i, unit in enumerate(units[: len(steps)]) if registers[bit] & unit]
            rest.append((1 << bit) ^ f2.combine(steps, sum(1 << i for i in inside)))
    assert not any(f2.combine(registers, mask) & low for mask in rest)
    inner = f2.span_elements(steps)
    groups = tuple(tuple(start ^ step for step in inner) for start in f2.span_elements(rest))
    return VectorGroups(1 << len(steps), groups, duplicate_registers(registers))


def duplicate_registers(registers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Pairs (register, the register without free bits that holds the same element)."""
    span = f2.Span()
    free = sum((not span.add(basis)) << bit for bit, basis in enumerate(registers))
    if not free:
        return ()
    return tuple(
        (register, owner)
        for register in range(1 << len(registers))
        if register & free and (owner := span.solve(f2.combine(registers, register))) is not None
    )
