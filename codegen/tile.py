"""Per-thread values of a tile: one scalar SSA value per register of the layout.

`Tile.registers` is a sequence indexed by the layout's register index. Integer and pointer tiles
compute it on demand (`LazyRegisters`): a memory op reads only the addresses at vector heads, and
the address arithmetic of the other registers is then never emitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from minitriton.ir.dialect import PtrType
from minitriton.ir.linear_layout import LinearLayout
from minitriton.ir.mlir import ir


class LazyRegisters(Sequence[ir.Value]):
    """Registers made when first read; `make(i)` emits register i at the tile's definition."""

    def __init__(self, count: int, make: Callable[[int], ir.Value]) -> None:
        self._values: list[ir.Value | None] = [None] * count
        self._make = make

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: int) -> ir.Value:  # type: ignore[override]  # never sliced
        value = self._values[index]
        if value is None:
            value = self._values[index] = self._make(index % len(self._values))
        return value

    def __iter__(self) -> Iterator[ir.Value]:
        return (self[i] for i in range(len(self._values)))


@dataclass(slots=True)
class Tile:
    """A distributed tile as one thread sees it.

    `element` is the carried type (`carried(...)`): pointers are `!llvm.ptr<1>`, fp8 is i8.
    `words`: i32 that hold f16 registers in pairs, where tensor cores made them so.
    """

    layout: LinearLayout
    element: ir.Type
    registers: Sequence[ir.Value]
    words: Sequence[ir.Value] = ()

    def __len__(self) -> int:
        return len(self.registers)


def carried(element: ir.Type) -> ir.Type:
    """The type in which a scalar or an element of type `element` is held in a register."""
    if isinstance(element, PtrType):
        return ir.Type.parse("!llvm.ptr<1>")
    if isinstance(element, (ir.Float8E4M3FNType, ir.Float8E5M2Type)):
        return ir.IntegerType.get_signless(8)
    return element
