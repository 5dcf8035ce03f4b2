"""Where the registers of a result come from under the shape changes of `LinearLayout`.

expand_dims, drop_dim, reshape and transpose keep register indices. For the others, code
generation (a tile is a Python list of per-register values) asks here.
"""

from __future__ import annotations

from collections.abc import Iterable

from minitriton.ir import f2
from minitriton.ir.linear_layout import LinearLayout, normalize_dim


def _kept_bits(layout: LinearLayout, dims: Iterable[int]) -> list[int]:
    squeezed = {normalize_dim(dim, layout.rank) for dim in dims}
    vectors = dict(layout.bases)["register"]
    return [
        bit
        for bit, vector in enumerate(vectors)
        if any(c for dim, c in enumerate(vector) if dim not in squeezed)
    ]


def broadcast_registers(result: LinearLayout, dims: int | Iterable[int]) -> list[int]:
    """Per register of `result`, the register of `result.broadcast_source(dims)` it copies."""
    kept = _kept_bits(result, (dims,) if isinstance(dims, int) else dims)
    return [
        sum(((register >> bit) & 1) << position for position, bit in enumerate(kept))
        for register in range(result.num_registers)
    ]


def slice_registers(source: LinearLayout, dim: int) -> list[int]:
    """Per register of `source.slice(dim)`, the first register of `source` on its line."""
    return f2.span_elements([1 << bit for bit in _kept_bits(source, (dim,))])


def join_registers(num_registers: int) -> list[tuple[int, int]]:
    """Per register of a join of two tiles: (operand 0 or 1, register of that operand)."""
    return [(i & 1, i >> 1) for i in range(2 * num_registers)]


def cat_registers(num_registers: int) -> list[tuple[int, int]]:
    """Per register of a cat of two tiles: (operand 0 or 1, register of that operand)."""
    return [(half, i) for half in range(2) for i in range(num_registers)]


def split_registers(source: LinearLayout) -> tuple[list[int], list[int]]:
    """Per register of `source.split()`, the source register of the first and second half."""
    selector = source.split_bit
    if selector is None:
        raise ValueError(f"the halves of {source} are not told apart by one register bit")
    others = [1 << bit for bit in range(source.in_bits("register")) if bit != selector]
    first = f2.span_elements(others)
    return first, [register ^ (1 << selector) for register in first]
