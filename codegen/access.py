"""How a memory operation on a tile is cut into vector accesses: which registers, which address.

Shared by loads, stores, atomics and asynchronous copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from minitriton.codegen.emit import width_of
from minitriton.codegen.tile import Tile
from minitriton.ir.mlir import ir

if TYPE_CHECKING:
    from minitriton.codegen.lower import Lowering

MAX_BYTES = 16


@dataclass(frozen=True)
class Access:
    """One vector access: `registers` in memory order, `offset` bytes from the address held by
    pointer register `base`; masks are equal over the whole vector."""

    registers: tuple[int, ...]
    base: int
    offset: int


@dataclass(frozen=True)
class AccessPlan:
    """All accesses of one thread. `duplicates`: (register, register with the same element)."""

    accesses: tuple[Access, ...]
    duplicates: tuple[tuple[int, int], ...]


def plan_access(
    lowering: Lowering, op: ir.Operation, element: ir.Type, max_bytes: int = MAX_BYTES
) -> AccessPlan:
    """The widest accesses that layout, contiguity, alignment and mask of `op` (operand 0 is the
    tile of pointers) allow; `element` is the carried element type in memory."""
    pointer = lowering.tile(op.operands[0])
    layout = pointer.layout
    size = max(width_of(element) // 8, 1)
    limits = lowering.axis.access_limits(op)
    best, best_dim = None, 0
    for dim in reversed(range(layout.rank)):
        groups = layout.contiguous_registers(dim, max(1, min(limits[dim], max_bytes // size)))
        if best is None or groups.width > best.width:
            best, best_dim = groups, dim
    assert best is not None
    bases = _AddressBases(lowering, op.operands[0], pointer, best_dim)
    accesses, held = [], frozenset(layout.registers)
    for group in best.groups:
        if group[0] not in held:
            continue
        base, elements = bases.of(group[0])
        accesses.append(Access(group, base, elements * size))
    return AccessPlan(tuple(accesses), best.duplicates)


class _AddressBases:
    """Addresses that differ by a known constant are computed from one register's address."""

    def __init__(self, lowering: Lowering, value: ir.Value, tile: Tile, dim: int) -> None:
        self.layout, self.dim = tile.layout, dim
        by_thread = 0
        for name in ("lane", "warp"):
            for basis in tile.layout.coordinate_bases(name, dim):
                by_thread |= basis
        # coordinate bits of this thread's registers inside one contiguous run of addresses
        self.run = (lowering.axis.of(value).contiguity[dim] - 1) & ~by_thread
        self.first: dict[tuple[int, ...], tuple[int, int]] = {}

    def of(self, register: int) -> tuple[int, int]:
        """(register with the base address, distance in elements)."""
        place = list(self.layout.apply(register=register))
        position = place[self.dim] & self.run
        place[self.dim] &= ~self.run
        base, start = self.first.setdefault(tuple(place), (register, position))
        return base, position - start
