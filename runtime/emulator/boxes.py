"""What a bulk copy moves: items of a box in global memory and their places in shared memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from minitriton.runtime.emulator.access import addresser
from minitriton.runtime.emulator.checks import BadTensorMap
from minitriton.runtime.emulator.memory import CARRIER, error
from minitriton.runtime.emulator.module import PARAM_WINDOW, WINDOW_SHIFT, Ins, Mem
from minitriton.runtime.emulator.operands import lanes_of
from minitriton.runtime.tensor_map import MAP_ALIGN, MAP_BYTES, TensorMap

_CHUNK = 16  # bytes that are written together
_LINE_BITS = 7  # the swizzle takes its key from the address bits above these
#: Each 16 bits of what is filled with NaN: see docs/emulator.md.
OOB_NAN = 0x7FF7
_PARAM = np.uint64(PARAM_WINDOW >> WINDOW_SHIFT)


def swizzled(at: np.ndarray, span: int) -> np.ndarray:
    """Shared offsets with the 16-byte chunks of each ``span`` permuted by the address bits above.

    128: bits 4-6 ^= bits 7-9; 64: bits 4-5 ^= bits 7-8; 32: bit 4 ^= bit 7; 0: unchanged.
    """
    return at ^ (at >> _LINE_BITS & span // 16 - 1) << 4 if span else at


@dataclass(frozen=True, slots=True)
class Items:
    """``size``-byte items that lanes move, a row per lane; ``inside`` None means all of them.

    ``shared`` are offsets within the CTA, ``address`` is meaningless outside the tensor.
    """

    size: int
    shared: np.ndarray
    address: np.ndarray
    inside: np.ndarray | None


@functools.lru_cache(maxsize=256)
def _grid(box: TensorMap, size: int) -> tuple[np.ndarray, ...]:
    """Per dimension, the offsets of the box's items: bytes along the innermost, else elements."""
    extents = [box.box[0] * box.element_bytes // size, *box.box[1:]]
    index = np.indices(extents[::-1]).reshape(len(extents), -1)[::-1]
    return (index[0] * size, *index[1:])


def box_items(
    box: TensorMap, start: np.ndarray, corner: list[np.ndarray], *, stores: bool = False
) -> Items:
    """The items of boxes whose first elements are at ``corner`` (int64 per dimension and lane).

    ``start`` are the shared offsets of the boxes. Items are as large as the corners allow. Rows
    that end within 16 bytes are stored up to the end of those, as an H200 was seen to do.
    """
    first = corner[0] * box.element_bytes
    width = box.dims[0] * box.element_bytes
    if stores:
        width = -(-width // _CHUNK) * _CHUNK
    common = int(np.bitwise_or.reduce(first)) | width | 16
    size = min(16, common & -common)
    grid = _grid(box, size)
    position = [first[:, None] + grid[0]]
    position += [corner[d][:, None] + grid[d] for d in range(1, box.rank)]
    inside = None
    for d, (at, limit) in enumerate(zip(position, (width, *box.dims[1:]), strict=True)):
        extent = box.box[d] * (box.element_bytes if d == 0 else 1)
        lowest = first if d == 0 else corner[d]
        if int(lowest.min()) < 0 or int(lowest.max()) + extent > limit:
            fits = (at >= 0) & (at < limit)
            inside = fits if inside is None else inside & fits
    address = position[0].copy()
    for at, stride in zip(position[1:], box.strides, strict=True):
        address += at * stride
    row = np.arange(grid[0].size, dtype=np.int64) * size
    return Items(
        size,
        swizzled(start[:, None] + row, box.swizzle),
        address.view(np.uint64) + np.uint64(box.address),
        inside,
    )


def fill_value(box: TensorMap, size: int) -> np.ndarray:
    """An item of what lies outside the tensor, as an array of one element."""
    if box.fill == "zero":
        return np.zeros(1, CARRIER[size])
    return np.full(size // 2, OOB_NAN, np.uint16).view(CARRIER[size])


MapReader = Callable[[Any, Any], list[tuple[TensorMap, np.ndarray]]]


def map_reader(ins: Ins, mem: Mem, rank: int | None) -> MapReader:
    """callable(chunk, ix) -> the maps an operand names, each with the positions in ``ix`` of it."""
    address = addresser(ins, mem, "generic")

    def read(c: Any, ix: Any) -> list[tuple[TensorMap, np.ndarray]]:
        lanes = lanes_of(c, ix)
        a = np.broadcast_to(address(c, ix), lanes.shape)
        found = []
        for where in np.unique(a):
            pick = np.flatnonzero(a == where)
            try:
                found.append((_usable(_image(ins, c, lanes[pick], where), rank), pick))
            except ValueError as problem:
                hint = "pass TensorMap(...).pack() as a .param .align 64 .b8 name[128]"
                raise error(BadTensorMap, ins, c, lanes[pick], str(problem), hint) from None
        return found

    return read


def _image(ins: Ins, c: Any, lanes: np.ndarray, address: np.uint64) -> bytes:
    offset = int(address) & (1 << WINDOW_SHIFT) - 1
    in_params = address >> np.uint64(WINDOW_SHIFT) == _PARAM
    if offset % MAP_ALIGN:
        raise ValueError(f"tensor map at {offset:#x}, which is no multiple of {MAP_ALIGN}")
    # The address of a parameter may come without cvta.param: no host memory lies that low.
    if in_params or offset < len(c.params):
        if offset + MAP_BYTES > len(c.params):
            raise ValueError(f"a tensor map of {MAP_BYTES} bytes ends past the parameters")
        return c.params[offset : offset + MAP_BYTES].tobytes()
    where = address + np.arange(0, MAP_BYTES, 16, dtype=np.uint64)
    owners = np.broadcast_to(lanes[:1], where.shape)
    return c.globals.load(ins, c, owners, where, 16).tobytes()


@functools.lru_cache(maxsize=256)
def _usable(image: bytes, rank: int | None) -> TensorMap:
    box = TensorMap.unpack(image)
    if rank not in (None, box.rank):
        raise ValueError(f"the map has rank {box.rank}")
    if box.swizzle not in (0, box.box[0] * box.element_bytes):
        # NVIDIA does not say how rows narrower than the span are laid out.
        raise ValueError(f"a row of the box must fill the swizzle span of {box.swizzle} bytes")
    return box
