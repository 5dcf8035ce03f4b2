"""Tensor maps: what a TMA instruction knows of a tensor in global memory and of the box it moves.

Stands in for CUtensorMap, whose bits NVIDIA does not publish. The rules are those of
cuTensorMapEncodeTiled with interleave none and element strides of one:
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TENSOR__MEMORY.html
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

#: Bytes of a packed map, and its alignment as a kernel parameter.
MAP_BYTES = 128
MAP_ALIGN = 64

_MAGIC = b"MTtmap01"
_LAYOUT = struct.Struct("<8sQ5B5I4Q5H")
_FILLS = ("zero", "nan")
_MAX_RANK = 5


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A tensor of up to five dimensions, innermost first, and the box that one TMA moves.

    Args:
        address: of element (0, ..., 0), a multiple of 16.
        element_bytes: 1, 2, 4 or 8.
        dims: extents in elements, innermost first.
        strides: bytes between neighbours along dimensions 1 and up (the innermost is contiguous).
        box: extents in elements of the box, innermost first.
        swizzle: 0, 32, 64 or 128: the span in bytes within which 16-byte chunks are permuted.
        fill: what lies outside the tensor reads as: "zero" or "nan" (floats of 2, 4, 8 bytes).
        tf32: loads round floats of 4 bytes to tf32, to nearest even (type TFLOAT32).

    Raises:
        ValueError: naming the field that breaks a rule.

    Example: 64 x 128 boxes of a row-major bf16 matrix with 4096 rows of 1024 elements::

        TensorMap(a.data_ptr(), 2, (1024, 4096), (2048,), (64, 128), swizzle=128).pack()
    """

    address: int
    element_bytes: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    fill: str = "zero"
    tf32: bool = False

    def __post_init__(self) -> None:
        rank = len(self.dims)
        _require(1 <= rank <= _MAX_RANK, "dims", f"has rank {rank}, not 1 to 5")
        _require(len(self.strides) == rank - 1, "strides", f"must have {rank - 1} items")
        _require(len(self.box) == rank, "box", f"must have {rank} items")
        _require(self.element_bytes in (1, 2, 4, 8), "element_bytes", "must be 1, 2, 4 or 8")
        fits = 0 <= self.address < 1 << 64 and self.address % 16 == 0
        _require(fits, "address", f"{self.address:#x} is not a multiple of 16")
        for i, extent in enumerate(self.dims):
            _require(1 <= extent <= 1 << 32, f"dims[{i}]", f"{extent} is not in 1 .. 2**32")
        for i, stride in enumerate(self.strides):
            fits = 0 <= stride < 1 << 40 and stride % 16 == 0
            _require(fits, f"strides[{i}]", f"{stride} is not a multiple of 16 below 2**40")
        for i, extent in enumerate(self.box):
            _require(1 <= extent <= 256, f"box[{i}]", f"{extent} is not in 1 .. 256")
        row = self.box[0] * self.element_bytes
        _require(row % 16 == 0, "box[0]", f"takes {row} bytes, not a multiple of 16")
        _require(self.swizzle in (0, 32, 64, 128), "swizzle", "must be 0, 32, 64 or 128")
        fits = not self.swizzle or rank > 1  # so the driver of CUDA 13.0, which says no more
        _require(fits, "dims", "has rank 1, and a swizzle needs 2 or more")
        fits = not self.swizzle or row <= self.swizzle
        _require(fits, "box[0]", f"takes {row} bytes, more than the swizzle span {self.swizzle}")
        _require(self.fill in _FILLS, "fill", "must be 'zero' or 'nan'")
        fits = self.fill == "zero" or self.element_bytes > 1
        _require(fits, "fill", "'nan' needs elements of 2, 4 or 8 bytes")
        _require(not self.tf32 or self.element_bytes == 4, "tf32", "needs elements of 4 bytes")

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def box_bytes(self) -> int:
        """Bytes of a whole box, also where it hangs over the tensor: what an mbarrier counts."""
        total = self.element_bytes
        for extent in self.box:
            total *= extent
        return total

    def pack(self) -> bytes:
        """The map as 128 bytes, to be passed as a ``.param .align 64 .b8 name[128]``."""
        unused = _MAX_RANK - self.rank
        image = _LAYOUT.pack(
            _MAGIC,
            self.address,
            self.element_bytes,
            self.rank,
            self.swizzle,
            _FILLS.index(self.fill),
            self.tf32,
            *(extent - 1 for extent in self.dims),  # 2**32 itself does not fit
            *[0] * unused,
            *self.strides,
            *[0] * unused,
            *self.box,
            *[0] * unused,
        )
        return image.ljust(MAP_BYTES, b"\0")

    @classmethod
    def unpack(cls, image: bytes) -> TensorMap:
        """The map that `pack` wrote; ValueError for anything else."""
        if len(image) != MAP_BYTES:
            raise ValueError(f"a tensor map has {MAP_BYTES} bytes, not {len(image)}")
        if image[: len(_MAGIC)] != _MAGIC:
            what = "all zero" if not any(image) else "not made by TensorMap.pack"
            raise ValueError(f"no tensor map: the {MAP_BYTES} bytes are {what}")
        _, address, size, rank, swizzle, fill, tf32, *numbers = _LAYOUT.unpack_from(image)
        dims, strides, box = numbers[:5], numbers[5:9], numbers[9:]
        return cls(
            address,
            size,
            tuple(extent + 1 for extent in dims[:rank]),
            tuple(strides[: rank - 1]),
            tuple(box[:rank]),
            swizzle,
            _FILLS[fill],
            bool(tf32),
        )


def _require(fits: bool, field: str, problem: str) -> None:
    if not fits:
        raise ValueError(f"tensor map: {field} {problem}")
