"""Where the registers of a result come from under the shape changes of `LinearLayout`.

expand_dims, drop_dim, reshape and transpose keep register indices. For the others, code
generation (a tile is a Python list of per-register values) asks here.
"""

from __future__ import annotations

from collections.abc import Iterable

from minitriton.ir import f2
from minitriton.ir.linear_layout import LinearLayout, granule, log2_exact, normalize_dim


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


def narrowed(layout: LinearLayout, dim: int, size: int) -> LinearLayout | None:
    """The layout of `size` elements of `layout` along `dim`, those that start at any multiple of
    `size`; None where others than whole register bits tell these parts apart."""
    outer = _part_bits(layout, dim, size)
    if outer is None:
        return None
    shape = (*layout.shape[:dim], size, *layout.shape[dim + 1 :])
    bases = dict(layout.bases)
    registers = [v for bit, v in enumerate(bases["register"]) if bit not in outer]
    return layout.with_shape(shape, {**bases, "register": registers})


def narrow_registers(layout: LinearLayout, dim: int, size: int, start: int) -> list[int]:
    """Per register of `narrowed(layout, dim, size)`, the register of the part at `start`."""
    outer = _part_bits(layout, dim, size)
    if outer is None:
        raise ValueError(f"registers do not tell apart {size} elements of {layout}")
    steps = dict(layout.bases)["register"]
    first = sum(1 << bit for bit in outer if steps[bit][dim] & start)
    inner = [1 << bit for bit in range(layout.in_bits("register")) if bit not in outer]
    return [first | register for register in f2.span_elements(inner)]


def _part_bits(layout: LinearLayout, dim: int, size: int) -> list[int] | None:
    """The register bits that step from one part of `size` elements along `dim` to others, one for
    each bit of the part's number; None where there are no such."""
    steps = layout.coordinate_bases("register", dim)
    outer = [bit for bit, step in enumerate(steps) if step >= size]
    fixed = (*layout.coordinate_bases("lane", dim), *layout.coordinate_bases("warp", dim))
    units = [size << n for n in range(log2_exact(layout.hulls[dim] // size))]
    vectors = dict(layout.bases)["register"]
    alone = all(sum(vectors[bit]) == steps[bit] for bit in outer)
    if any(step >= size for step in fixed) or not alone:
        return None
    return outer if sorted(steps[bit] for bit in outer) == units else None


def join_registers(num_registers: int) -> list[tuple[int, int]]:
    """Per register of a join of two tiles: (operand 0 or 1, register of that operand)."""
    return [(i & 1, i >> 1) for i in range(2 * num_registers)]


def _in_block(layout: LinearLayout, dim: int, register: int, start: int) -> int:
    """Where the block that starts at `start` along `dim` has what its own has in `register`."""
    block = granule(layout.shape[dim])
    steps = list(enumerate(layout.coordinate_bases("register", dim)))
    outer = {step: 1 << bit for bit, step in steps if step >= block}
    inner = register & ~sum(1 << bit for bit, step in steps if step >= block)
    return inner | sum(bit for step, bit in outer.items() if step & start)


def _block_starts(layout: LinearLayout, dim: int) -> list[int]:
    """Per register, where its block starts along `dim`."""
    block = granule(layout.shape[dim])
    places = f2.span_elements(layout.coordinate_bases("register", dim))
    return [place & -block for place in places]


def cat_registers(source: LinearLayout, dim: int) -> list[tuple[int, int]]:
    """Per register of `source.cat(dim)`: (operand 0 or 1, register of that operand)."""
    size, whole = source.shape[dim], source.hulls[dim]
    picks = []
    for first in (0, whole):
        for register, start in enumerate(_block_starts(source, dim)):
            operand = int(first + start >= size)
            place = (first + start - operand * size) & (whole - 1)
            picks.append((operand, _in_block(source, dim, register, place)))
    return picks


def flip_registers(layout: LinearLayout, dim: int) -> list[int]:
    """Per register, that of the block as far from the other end along `dim`."""
    size, whole = layout.shape[dim], layout.hulls[dim]
    last = size - granule(size)
    return [
        _in_block(layout, dim, register, (last - start) & (whole - 1))
        for register, start in enumerate(_block_starts(layout, dim))
    ]


def split_registers(source: LinearLayout) -> tuple[list[int], list[int]]:
    """Per register of `source.split()`, the source register of the first and second half."""
    selector = source.split_bit
    if selector is None:
        raise ValueError(f"the halves of {source} are not told apart by one register bit")
    others = [1 << bit for bit in range(source.in_bits("register")) if bit != selector]
    first = f2.span_elements(others)
    return first, [register ^ (1 << selector) for register in first]
