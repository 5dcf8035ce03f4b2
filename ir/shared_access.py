"""How the threads of a CTA read or write a tile in shared memory, as linear offsets.

The element offset of a register group is the XOR of one basis per set lane and warp bit and a
constant per group: a few XORs once, then a constant per access.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from minitriton.ir import f2
from minitriton.ir.linear_layout import LinearLayout, log2_exact
from minitriton.ir.ragged import Gap, gaps
from minitriton.ir.vector_groups import contiguous_groups

MAX_VECTOR_BITS = 128


@dataclass(frozen=True)
class Displacement:
    """A constant element offset, to be applied as (base ^ xor_offset) + add_offset.

    The bits that the base can have set go into xor_offset, of which a plan has few distinct
    values; the rest may be an immediate of the instruction.
    """

    xor_offset: int
    add_offset: int

    @property
    def offset(self) -> int:
        """The whole constant: the address is also base ^ offset."""
        return self.xor_offset | self.add_offset

    @property
    def add_is_legal(self) -> bool:
        """base + offset gives the same address as base ^ offset."""
        return self.xor_offset == 0


@dataclass(frozen=True)
class AccessGroup(Displacement):
    """One vector access: `registers` in address order, displaced from the base."""

    registers: tuple[int, ...]


@dataclass(frozen=True)
class SharedAccessPlan:
    """Offsets in elements; base = XOR of lane_bases and warp_bases over the set bits;
    they count the `gaps` of a tile, too (ir/ragged.py).

    vec: elements per access. duplicates: (register, register that holds the same element):
    ignore them when storing, copy them after loading. Threads with lane & free_lane_mask or
    warp & free_warp_mask only repeat what another thread stores.
    """

    elem_bits: int
    vec: int
    groups: tuple[AccessGroup, ...]
    lane_bases: tuple[int, ...]
    warp_bases: tuple[int, ...]
    duplicates: tuple[tuple[int, int], ...]
    free_lane_mask: int
    free_warp_mask: int
    gaps: tuple[Gap, ...] = ()


def offsets_of(shared: LinearLayout, distributed: LinearLayout) -> dict[str, tuple[int, ...]]:
    """Element offset that each bit of register, lane and warp XORs in."""
    where = shared.invert_and_compose(distributed)
    return {name: tuple(vector[0] for vector in vectors) for name, vectors in where.bases}


def reachable(bases: Sequence[int]) -> int:
    """All bits that some combination of `bases` sets."""
    result = 0
    for basis in bases:
        result |= basis
    return result


@functools.lru_cache(maxsize=4096)
def shared_access_plan(
    shared: LinearLayout,
    distributed: LinearLayout,
    elem_bits: int,
    max_vector_bits: int = MAX_VECTOR_BITS,
) -> SharedAccessPlan:
    """Plain loads or stores of a distributed tile, as wide as both layouts allow.

    elem_bits: 8 to 64. max_vector_bits: limit below 128 where the alignment of the buffer or
    the instruction asks for it.
    """
    offsets = offsets_of(shared, distributed)
    others = offsets["lane"] + offsets["warp"]
    units = units_of(shared)
    max_bits = log2_exact(max(1, max_vector_bits // elem_bits))
    vectors = contiguous_groups(offsets["register"], others, units, max_bits)
    touched = reachable(others)
    groups, held = [], frozenset(distributed.registers)
    for registers in vectors.groups:
        if registers[0] not in held:
            continue
        offset = f2.combine(offsets["register"], registers[0])
        groups.append(AccessGroup(offset & touched, offset & ~touched, registers))
    return SharedAccessPlan(
        elem_bits,
        vectors.width,
        tuple(groups),
        offsets["lane"],
        offsets["warp"],
        vectors.duplicates,
        distributed.free_bits("lane"),
        distributed.free_bits("warp"),
        gaps(shared),
    )


def units_of(shared: LinearLayout) -> list[int]:
    """Offsets 1, 2, 4, ... up to where one leads out of a granule: vectors exist as a whole."""
    units = []
    for bit, step in enumerate(shared.flat("offset")):
        if step & shared.ragged_mask:
            break
        units.append(1 << bit)
    return units


def phase_lanes(access_bytes: int, num_lanes: int = 32) -> int:
    """Lanes that the hardware serves together: 32, or fewer for 8- and 16-byte accesses."""
    return min(num_lanes, 128 // max(4, access_bytes))


def conflict_degree(byte_addresses: Sequence[int], access_bytes: int) -> int:
    """Wavefronts that the slowest phase of one warp access takes, 1 being conflict-free."""
    worst = 1
    step = phase_lanes(access_bytes, len(byte_addresses))
    for start in range(0, len(byte_addresses), step):
        words: dict[int, set[int]] = {}
        for address in byte_addresses[start : start + step]:
            for word in range(address // 4, (address + access_bytes - 1) // 4 + 1):
                words.setdefault(word % 32, set()).add(word)
        worst = max(worst, *map(len, words.values()))
    return worst


def bank_conflicts(shared: LinearLayout, accessor: LinearLayout, vec: int, elem_bits: int) -> int:
    """Exact conflict degree of a warp that accesses `vec` elements per thread, 1 being none.

    All register groups and warps have the same degree: they only XOR a constant into every
    address.
    """
    lane_offsets = f2.span_elements(offsets_of(shared, accessor)["lane"])
    addresses = [offset * elem_bits // 8 for offset in lane_offsets]
    return conflict_degree(addresses, vec * elem_bits // 8)
