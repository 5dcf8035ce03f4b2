"""Layouts as F2-linear maps: from bits of (register, lane, warp) or of a shared-memory
offset to the coordinates of a tile.

Every bit of an input contributes one coordinate vector and contributions combine by XOR.
The algebra has powers of two: the C-order linear index of an element is the concatenation of
its coordinates' bits, XOR acts on it too, and all runs on plain ints ("flat" bases).
Distributions that other compilers treat as classes are values of this one class.

A tile of another size has the layout of its *hull*, the next power of two, without the elements
beyond its end. Which coordinates exist is decided by the bits from the largest
power of two in the size upwards, its *granule*; in a distributed layout only registers move
along those, so a register holds elements in all threads or in none.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from minitriton.ir import f2
from minitriton.ir.vector_groups import VectorGroups, contiguous_groups, run_bits

if TYPE_CHECKING:
    import numpy as np

DISTRIBUTED = ("register", "lane", "warp")
SHARED = ("offset",)
SIZE_STEP = 16  # of sizes that are no powers of two: lanes share 16 elements along a dimension


def hull(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << max(size - 1, 0).bit_length()


def granule(size: int) -> int:
    """The largest power of two that divides `size`."""
    return size & -size


def is_tile_size(size: int) -> bool:
    """Whether a tile can have so many elements along a dimension."""
    return size > 0 and (size == hull(size) or size % SIZE_STEP == 0)


def log2_exact(size: int) -> int:
    """log2 of a power of two; ValueError for any other size."""
    if size <= 0 or size & (size - 1):
        raise ValueError(f"layout sizes must be powers of two, got {size}")
    return size.bit_length() - 1


@dataclass(frozen=True)
class LinearLayout:
    """shape: the tile; `hulls` are its sizes rounded up to powers of two. bases: per input name,
    per bit, the coordinates it XORs in. Distributed layouts have the inputs register, lane, warp;
    shared-memory layouts have one input, the offset in elements."""

    shape: tuple[int, ...]
    bases: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]

    def __post_init__(self) -> None:
        if min(self.shape, default=1) < 1:
            raise ValueError(f"a tile of shape {self.shape} has no elements")
        for name, vectors in self.bases:
            for vector in vectors:
                if (
                    len(vector) != len(self.shape)
                    or min(vector, default=0) < 0
                    or any(map(operator.ge, vector, self.hulls))
                ):
                    raise ValueError(f"{name} basis {vector} lies outside the tile {self.shape}")
        if self.is_ragged and self.is_distributed:
            self._check_ragged()

    def _check_ragged(self) -> None:
        """Registers alone, each bit by one step, reach beyond the granules."""
        ragged = self.ragged_mask
        for name in DISTRIBUTED:
            for value in self._flat[name]:
                if value & ragged and (name != "register" or value.bit_count() > 1):
                    raise ValueError(f"a {name} bit of {self} moves beyond a granule")

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.bases))

    # Construction and serialisation

    @staticmethod
    def from_flat(shape: Sequence[int], flat: Mapping[str, Iterable[int]]) -> LinearLayout:
        """Build from C-order linear bases, e.g. {'register': [1], 'lane': [2, 4], 'warp': []}."""
        shape = tuple(shape)
        shifts, hulls = _dim_shifts(shape), tuple(map(hull, shape))
        if set(flat) == set(DISTRIBUTED):  # attribute dictionaries come sorted by name
            flat = {name: flat[name] for name in DISTRIBUTED}

        def vector(value: int) -> tuple[int, ...]:
            if not 0 <= value < prod(hulls):
                raise ValueError(f"flat basis {value} lies outside the tile {shape}")
            return tuple((value >> s) & (n - 1) for s, n in zip(shifts, hulls, strict=True))

        return LinearLayout(
            shape, tuple((name, tuple(map(vector, values))) for name, values in flat.items())
        )

    @staticmethod
    def distributed(
        shape: Sequence[int],
        register: Iterable[Sequence[int]],
        lane: Iterable[Sequence[int]],
        warp: Iterable[Sequence[int]],
    ) -> LinearLayout:
        """Build a distributed layout from coordinate vectors per register, lane and warp bit."""
        groups = zip(DISTRIBUTED, (register, lane, warp), strict=True)
        return LinearLayout(
            tuple(shape), tuple((name, tuple(map(tuple, vectors))) for name, vectors in groups)
        )

    @staticmethod
    def shared(shape: Sequence[int], offset: Iterable[Sequence[int]]) -> LinearLayout:
        """Build a shared-memory layout from the coordinate vector of every offset bit."""
        return LinearLayout(tuple(shape), (("offset", tuple(map(tuple, offset))),))

    def to_flat(self) -> dict[str, list[int]]:
        """C-order linear bases per input, the form the IR stores; inverse of `from_flat`."""
        return {name: list(self.flat(name)) for name in self.in_dims}

    @functools.cached_property
    def _text(self) -> str:
        parts = []
        for name, vectors in self.bases:
            shown = [
                str(v[0]) if len(v) == 1 else "(" + ",".join(map(str, v)) + ")" for v in vectors
            ]
            parts.append(f"{name}=[{' '.join(shown)}]")
        return f"{'x'.join(map(str, self.shape)) or 'scalar'}{{{' '.join(parts)}}}"

    def __str__(self) -> str:
        return self._text

    # Sizes and flat bases

    @property
    def rank(self) -> int:
        """Number of tile dimensions."""
        return len(self.shape)

    @functools.cached_property
    def hulls(self) -> tuple[int, ...]:
        """The sizes rounded up to powers of two."""
        return tuple(map(hull, self.shape))

    @functools.cached_property
    def is_ragged(self) -> bool:
        """Whether some size is no power of two."""
        return self.hulls != self.shape

    @functools.cached_property
    def ragged_mask(self) -> int:
        """The bits of a linear index that decide whether an element exists."""
        return sum(
            (size - granule(real)) << shift
            for size, real, shift in zip(self.hulls, self.shape, self.dim_shifts, strict=True)
            if size != real
        )

    def exists(self, index: int) -> bool:
        """Whether the tile has an element of this linear index."""
        coordinates = self.unflatten(index)
        return all(c < size for c, size in zip(coordinates, self.shape, strict=True))

    @functools.cached_property
    def registers(self) -> tuple[int, ...]:
        """The registers that hold elements: all, where sizes are powers of two."""
        numbers = range(self.num_registers)
        if not self.is_ragged:
            return tuple(numbers)
        held = f2.span_elements(self._flat["register"])
        return tuple(number for number in numbers if self.exists(held[number] & self.ragged_mask))

    @functools.cached_property
    def in_dims(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.bases)

    @functools.cached_property
    def num_bits(self) -> int:
        """log2 of the number of elements of the hull."""
        return sum(map(log2_exact, self.hulls))

    @functools.cached_property
    def dim_shifts(self) -> tuple[int, ...]:
        """Position of each dimension's lowest bit inside a C-order linear index."""
        return _dim_shifts(self.shape)

    @functools.cached_property
    def _flat(self) -> dict[str, tuple[int, ...]]:
        return {
            name: tuple(self.flatten(vector) for vector in vectors) for name, vectors in self.bases
        }

    def flat(self, name: str) -> tuple[int, ...]:
        """C-order linear basis of each bit of the input `name`."""
        return self._flat[name]

    @functools.cached_property
    def flat_all(self) -> tuple[int, ...]:
        """Linear bases of all inputs in order (register bits first)."""
        return tuple(value for name in self.in_dims for value in self._flat[name])

    def flatten(self, coordinates: Sequence[int]) -> int:
        """C-order linear index of a coordinate vector."""
        return sum(c << s for c, s in zip(coordinates, self.dim_shifts, strict=True))

    def unflatten(self, index: int) -> tuple[int, ...]:
        """Coordinates of a C-order linear index."""
        return tuple(
            (index >> s) & (n - 1) for s, n in zip(self.dim_shifts, self.hulls, strict=True)
        )

    def dim_mask(self, dim: int) -> int:
        """The bits of a linear index that belong to dimension `dim`."""
        return (self.hulls[dim] - 1) << self.dim_shifts[dim]

    def in_bits(self, name: str) -> int:
        return len(self._flat[name])

    def in_size(self, name: str) -> int:
        return 1 << len(self._flat[name])

    @property
    def num_registers(self) -> int:
        """Numbers that registers have in each thread; `registers` are those of elements."""
        return self.in_size("register")

    @property
    def num_lanes(self) -> int:
        return self.in_size("lane")

    @property
    def num_warps(self) -> int:
        return self.in_size("warp")

    @property
    def is_distributed(self) -> bool:
        return self.in_dims == DISTRIBUTED

    def coordinate_bases(self, name: str, dim: int) -> tuple[int, ...]:
        """What each bit of input `name` XORs into the coordinate along `dim`."""
        return tuple(vector[dim] for vector in dict(self.bases)[name])

    # Evaluation

    def apply_flat(self, **inputs: Any) -> Any:
        """Linear element index for inputs given as ints or broadcastable integer arrays."""
        result: Any = 0
        for name, value in inputs.items():
            result = result ^ (value & 0)  # an array's shape, even where there are no bits
            for bit, basis in enumerate(self._flat[name]):
                result = result ^ (((value >> bit) & 1) * basis)
        return result

    def apply(self, **inputs: Any) -> tuple[Any, ...]:
        """Coordinates, one per dimension; inputs left out count as 0."""
        index = self.apply_flat(**inputs)
        return tuple(
            (index >> s) & (n - 1) for s, n in zip(self.dim_shifts, self.hulls, strict=True)
        )

    def flat_table(self) -> np.ndarray:
        """int64 array of linear element indices with one axis per input."""
        import numpy as np

        table: np.ndarray = np.zeros((), np.int64)
        for name in self.in_dims:
            table = table[..., None] ^ np.array(f2.span_elements(self._flat[name]), np.int64)
        return table

    def table(self) -> np.ndarray:
        """int64 coordinates, shape [registers, lanes, warps, rank] (one axis per input + rank)."""
        import numpy as np

        flat = self.flat_table()[..., None]
        sizes = np.array(self.hulls, np.int64)
        coordinates: np.ndarray = (flat >> np.array(self.dim_shifts, np.int64)) & (sizes - 1)
        return coordinates

    # Algebra

    @functools.cached_property
    def _span(self) -> f2.Span:
        return f2.Span(self.flat_all)

    @functools.cached_property
    def is_surjective(self) -> bool:
        """Every element of the tile is held somewhere."""
        return self._span.rank == self.num_bits

    @functools.cached_property
    def is_injective(self) -> bool:
        """No element is held twice."""
        return self._span.rank == len(self.flat_all)

    def compose(self, outer: LinearLayout) -> LinearLayout:
        """outer after self: coordinate i of this layout is fed to input i of `outer`."""
        sizes = tuple(outer.in_size(name) for name in outer.in_dims)
        if sizes != self.hulls:
            raise ValueError(f"cannot feed a {self.shape} result to inputs of sizes {sizes}")
        flat = {
            name: [
                outer.apply_flat(**dict(zip(outer.in_dims, vector, strict=True)))
                for vector in vectors
            ]
            for name, vectors in self.bases
        }
        return LinearLayout.from_flat(outer.shape, flat)

    def _split_inputs(self, mask: int) -> tuple[int, ...]:
        """Cut a mask over all input bits into one value per input."""
        values = []
        for name in self.in_dims:
            values.append(mask & (self.in_size(name) - 1))
            mask >>= self.in_bits(name)
        return tuple(values)

    def invert(self) -> LinearLayout:
        """Coordinates -> inputs, a right inverse: the canonical owner of each element.

        The result has inputs dim0, dim1, ... and one coordinate per input of this layout.
        Replicating bits stay 0. ValueError where an element is held nowhere.
        """
        # free bits never enter a combination: a dependent vector adds no row to the span
        bases = []
        for dim, size in enumerate(self.hulls):
            vectors = []
            for bit in range(log2_exact(size)):
                mask = self._span.solve(1 << (self.dim_shifts[dim] + bit))
                if mask is None:
                    raise ValueError(f"not every element of the tile is held by {self}")
                vectors.append(self._split_inputs(mask))
            bases.append((f"dim{dim}", tuple(vectors)))
        return LinearLayout(tuple(self.in_size(n) for n in self.in_dims), tuple(bases))

    def invert_and_compose(self, dst: LinearLayout) -> LinearLayout:
        """For each input of `dst`, where this layout holds the same element.

        The result has dst's inputs and coordinates (register, lane, warp) of this layout (or
        (offset,) for shared memory). Bit by bit it prefers the same lane and warp, then the
        same warp. ValueError where shapes differ or an element is held nowhere.
        """
        return _invert_and_compose(self, dst)

    @functools.cached_property
    def _free(self) -> dict[str, int]:
        span = f2.Span()
        return {
            name: sum((not span.add(value)) << bit for bit, value in enumerate(self._flat[name]))
            for name in self.in_dims
        }

    def free_bits(self, name: str) -> int:
        """Mask of the bits of an input that only replicate data.

        Registers claim elements first, then lanes, then warps. Exactly one (register, lane,
        warp) with all free bits 0 owns each held element.
        """
        return self._free[name]

    # Vectors

    def _units(self, dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Flat bases of lanes and warps, and the flat steps 1, 2, 4, ... along `dim`."""
        dim = normalize_dim(dim, self.rank)
        shift = self.dim_shifts[dim]
        units = tuple(1 << (shift + bit) for bit in range(log2_exact(granule(self.shape[dim]))))
        return self._flat["lane"] + self._flat["warp"], units

    def vector_run(self, dim: int) -> int:
        """Largest 2^k such that every aligned group of 2^k consecutive registers holds 2^k
        consecutive elements along `dim`, starting at a multiple of 2^k."""
        others, units = self._units(dim)
        return 1 << run_bits(self._flat["register"], others, units)

    def contiguous_registers(self, dim: int, max_width: int = 1 << 30) -> VectorGroups:
        """The widest vectors along `dim` that some order of the registers gives."""
        others, units = self._units(dim)
        registers = self._flat["register"]
        return contiguous_groups(registers, others, units, log2_exact(max_width))

    # Shape changes without data movement (register maps: ir/register_maps.py)

    def with_shape(self, shape: Sequence[int], bases: Mapping[str, Any]) -> LinearLayout:
        """Same kind of layout with new coordinate vectors per input."""
        return LinearLayout(tuple(shape), tuple((n, tuple(bases[n])) for n in self.in_dims))

    def _map_coordinates(
        self, shape: Sequence[int], change: Callable[[tuple[int, ...]], tuple[int, ...]]
    ) -> LinearLayout:
        return self.with_shape(shape, {n: [change(v) for v in vs] for n, vs in self.bases})

    def drop_zero_registers(self) -> LinearLayout:
        """Without the register bits that only repeat values."""
        kept = [(n, tuple(v for v in vs if n != "register" or any(v))) for n, vs in self.bases]
        return LinearLayout(self.shape, tuple(kept))

    def squeeze_dim_to_one(self, dim: int) -> LinearLayout:
        """Layout after reducing `dim` to size 1; zero register bits go, lanes and warps stay."""
        dim = normalize_dim(dim, self.rank)
        shape = (*self.shape[:dim], 1, *self.shape[dim + 1 :])
        return self._map_coordinates(
            shape, lambda v: (*v[:dim], 0, *v[dim + 1 :])
        ).drop_zero_registers()

    def slice(self, dim: int) -> LinearLayout:
        """Layout after reducing `dim` away."""
        return self.squeeze_dim_to_one(dim).drop_dim(dim)

    def broadcast_source(self, dims: int | Iterable[int]) -> LinearLayout:
        """Layout an operand of size 1 along `dims` needs so that broadcasting it gives this."""
        layout = self
        for dim in (dims,) if isinstance(dims, int) else dims:
            layout = layout.squeeze_dim_to_one(dim)
        return layout.drop_zero_registers()

    def expand_dims(self, dim: int) -> LinearLayout:
        """Insert a dimension of size 1 before position `dim` (-1: after the last)."""
        dim = normalize_dim(dim, self.rank + 1)
        shape = (*self.shape[:dim], 1, *self.shape[dim:])
        return self._map_coordinates(shape, lambda v: (*v[:dim], 0, *v[dim:]))

    def drop_dim(self, dim: int) -> LinearLayout:
        """Remove a dimension of size 1."""
        dim = normalize_dim(dim, self.rank)
        if self.shape[dim] != 1:
            raise ValueError(f"dimension {dim} of {self.shape} is not 1")
        shape = (*self.shape[:dim], *self.shape[dim + 1 :])
        return self._map_coordinates(shape, lambda v: (*v[:dim], *v[dim + 1 :]))

    def reshape(self, shape: Sequence[int]) -> LinearLayout:
        """C-order reshape: every register keeps its element. ValueError where the hull's order of
        elements is not the tile's (`segments`)."""
        if segments(shape) != segments(self.shape):
            raise ValueError(f"cannot reshape {self.shape} to {tuple(shape)}")
        return LinearLayout.from_flat(shape, self._flat)

    def transpose(self, order: Sequence[int]) -> LinearLayout:
        """Result dimension i is dimension order[i] of this layout."""
        if sorted(order) != list(range(self.rank)):
            raise ValueError(f"{tuple(order)} is no permutation of {self.rank} dimensions")
        shape = [self.shape[dim] for dim in order]
        return self._map_coordinates(shape, lambda v: tuple(v[dim] for dim in order))

    def join(self) -> LinearLayout:
        """Layout of two joined tiles: a new minor dimension of size 2, the lowest register bit."""
        wide = self._map_coordinates((*self.shape, 2), lambda v: (*v, 0))
        bases = dict(wide.bases)
        bases["register"] = ((0,) * self.rank + (1,), *bases["register"])
        return wide.with_shape(wide.shape, bases)

    @functools.cached_property
    def split_bit(self) -> int | None:
        """The register bit that alone selects the half along a minor dimension of size 2."""
        if self.rank == 0 or self.shape[-1] != 2:
            return None
        users = [value for value in self.flat_all if value & 1]
        registers = self._flat["register"]
        return registers.index(1) if users == [1] and 1 in registers else None

    def can_split(self) -> bool:
        """True where `split` needs no data movement."""
        return self.split_bit is not None

    def split(self) -> LinearLayout:
        """Layout of the two halves of a tile with a minor dimension of size 2."""
        bit = self.split_bit
        if bit is None:
            raise ValueError(f"the halves of {self} are not told apart by one register bit")
        bases = {n: [v[:-1] for v in vs] for n, vs in self.bases}
        del bases["register"][bit]
        return self.with_shape(self.shape[:-1], bases)

    def cat(self, dim: int = 0) -> LinearLayout:
        """Layout of two tiles one after the other along `dim`: a new highest register bit. Blocks
        of the second may be in registers that blocks of the first have left out."""
        dim = normalize_dim(dim, self.rank)
        shape = (*self.shape[:dim], 2 * self.shape[dim], *self.shape[dim + 1 :])
        bases = dict(self.bases)
        half = tuple(size if d == dim else 0 for d, size in enumerate(self.hulls))
        bases["register"] = (*bases["register"], half)
        return self.with_shape(shape, bases)


def normalize_dim(dim: int, rank: int) -> int:
    """Map a possibly negative dimension to 0..rank-1; ValueError where there is none."""
    if not -rank <= dim < rank:
        raise ValueError(f"dimension {dim} does not exist in a tile of rank {rank}")
    return dim % rank


@functools.lru_cache(maxsize=1024)
def _dim_shifts(shape: tuple[int, ...]) -> tuple[int, ...]:
    shifts = []
    position = 0
    for size in reversed(shape):
        shifts.append(position)
        position += log2_exact(hull(size))
    return tuple(reversed(shifts))


def segments(shape: Sequence[int]) -> list[int]:
    """Numbers of elements from one dimension that is no power of two to the next: shapes with the
    same have the same linear indices in C order and in the hull."""
    found = [1]
    for size in shape:
        if size == hull(size):
            found[-1] *= size
        else:
            found.append(size)
    return found


@functools.lru_cache(maxsize=4096)
def _invert_and_compose(src: LinearLayout, dst: LinearLayout) -> LinearLayout:
    if src.shape != dst.shape:
        raise ValueError(f"layouts of different tiles: {src.shape} and {dst.shape}")
    starts = {}
    position = 0
    for name in src.in_dims:
        starts[name] = position
        position += src.in_bits(name)
    # spans over the first inputs only: a solution there moves nothing further out
    prefixes = [
        f2.Span(v for name in src.in_dims[:count] for v in src.flat(name))
        for count in range(1, len(src.in_dims) + 1)
    ]

    def place(name: str, bit: int, value: int) -> tuple[int, ...]:
        tries = [(prefix, 0, value) for prefix in prefixes]
        if name in ("lane", "warp") and name in src.in_dims and bit < src.in_bits(name):
            same = 1 << (starts[name] + bit)
            nearer = prefixes[: src.in_dims.index(name)]
            rest = value ^ src.flat(name)[bit]
            tries = [(prefix, same, rest) for prefix in nearer] + tries
        for prefix, chosen, rest in tries:
            mask = prefix.solve(rest)
            if mask is not None:
                return src._split_inputs(mask ^ chosen)
        raise ValueError(f"not every element of the tile is held by {src}")

    bases = tuple(
        (name, tuple(place(name, bit, value) for bit, value in enumerate(dst.flat(name))))
        for name in dst.in_dims
    )
    return LinearLayout(tuple(src.in_size(n) for n in src.in_dims), bases)
