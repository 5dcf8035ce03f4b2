"""The tensor maps of a kernel's TMA copies, made from the arguments of a launch.

`ir/tensor_map_specs.py` says how the compiler describes them. A launch whose arguments no map can
describe (an empty matrix, a negative stride) has none: it takes the kernel that copies without TMA.
Where a map depends on how far an argument's memory reaches, that is its tensor's storage, as
(address, bytes); an argument without any has no such map.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minitriton.ir.terms import evaluate
from minitriton.runtime import driver
from minitriton.runtime.tensor_map import MAP_BYTES, TensorMap

ENDLESS = 1 << 31  # size of a dimension whose end only the kernel's mask of other dimensions knows
CACHED = 1024  # sets of maps kept per kernel, and shapes
ADDRESS_BYTES = 16  # an address is a multiple of this
_IMAGE_ALIGNMENT = 64


Memory = tuple[int, int]  # address and bytes of what an array is part of


def tensor_map(
    spec: dict[str, Any], values: Sequence[int], memory: Mapping[int, Memory | None] | None = None
) -> TensorMap | None:
    """The map for a launch with these arguments, of which those that `bounded` names are in
    `memory`; None where there is no such map."""
    size = spec["element_bytes"]
    if any(values[number] < 0 for number in spec["non_negative"]):
        return None
    address = values[spec["base"]] + evaluate(spec["offset"], values) * size
    sizes = [ENDLESS if s is None else evaluate(s, values) for s in spec["sizes"]]
    strides = [evaluate(s, values) * size for s in spec["strides"]]
    if spec["spans"] or spec["signed"]:
        found = (memory or {}).get(spec["base"])
        inner = zip(sizes[:-1], (size, *strides[:-1]), strict=True)
        extent = size + sum((count - 1) * stride for count, stride in inner)
        if found is None or strides[-1] <= 0 or min(sizes[:-1]) <= 0:
            return None
        if spec["signed"] and address - found[0] + extent > strides[-1]:
            return None
        if spec["spans"]:
            sizes[-1] = _count(address, extent, strides[-1], found)
    try:
        return TensorMap(
            address=address,
            element_bytes=size,
            dims=tuple(sizes),
            strides=tuple(strides),
            box=tuple(spec["box"]),
            swizzle=spec["swizzle"],
            fill=spec["fill"],
            tf32=spec["element"] == "tf32",
        )
    except ValueError:
        return None


def _count(address: int, extent: int, stride: int, memory: Memory) -> int:
    """How many pieces of `extent` bytes, `stride` apart, lie from `address` on in memory; 0 if some
    of the next one is there, too."""
    start, count = memory
    left = start + count - address
    pieces = (left - extent) // stride + 1
    whole = address >= start and left <= pieces * stride and pieces <= ENDLESS
    return max(0, pieces) if whole else 0


def bounded(specs: Sequence[dict[str, Any]]) -> list[int]:
    """The arguments of which the maps need to know how far their memory reaches."""
    return sorted({spec["base"] for spec in specs if spec["spans"] or spec["signed"]})


def needed(specs: Sequence[dict[str, Any]]) -> list[int]:
    """The arguments that the maps depend on."""
    found = set()
    for spec in specs:
        found |= {spec["base"], *spec["non_negative"]}
        terms = [spec["offset"], *spec["strides"], *(s for s in spec["sizes"] if s is not None)]
        found |= {number for sums in terms for _, numbers in sums for number in numbers}
    return sorted(found)


def packed(
    specs: Sequence[dict[str, Any]], values: Sequence[int],
    memory: Mapping[int, Memory | None] | None = None,
) -> list[bytes] | None:  # fmt: skip
    """The emulator's form of all maps of a launch; None where one cannot be."""
    maps = [tensor_map(spec, values, memory) for spec in specs]
    return [m.pack() for m in maps if m is not None] if None not in maps else None


def encoder(specs: Sequence[dict[str, Any]], count: int) -> Callable[..., bytes | None]:
    """A function of the values that `needed` names, and, if `bounded` names some, a tuple of their
    memory: the driver's form of all maps, one after the other, or None where one cannot be.
    `count`: arguments of the kernel.

    Encoding a map takes the driver's binding some 50 us. So it happens once for sizes and strides;
    new addresses, as outputs have in every call, are put in.
    """
    numbers, owned = needed(specs), bounded(specs)
    bases = [spec["base"] for spec in specs]
    shapes: dict[tuple[Any, ...], tuple[tuple[bytes, int], ...] | None] = {}

    def shaped(
        values: list[int], memory: Mapping[int, Memory | None]
    ) -> tuple[tuple[bytes, int], ...] | None:
        """Of each map an image with some address, and how far that is from the argument."""
        made = [tensor_map(spec, values, memory) for spec in specs]
        if None in made:
            return None
        return tuple(
            (_encode(m, spec["element"]), m.address - values[spec["base"]])
            for m, spec in zip(made, specs, strict=True)
            if m is not None
        )

    @functools.lru_cache(maxsize=CACHED)
    def maps(*found: Any) -> bytes | None:
        values = [0] * count
        for number, value in zip(numbers, found, strict=False):
            values[number] = value
        memory = dict(zip(owned, found[-1] if owned else (), strict=True))
        if any(values[base] % ADDRESS_BYTES or not values[base] for base in bases):
            return None  # empty tensors are nowhere
        shape = (
            *(values[n] for n in numbers if n not in bases),
            *(m and (values[n] - m[0], m[1]) for n, m in memory.items()),
        )
        images = shapes.get(shape, ())
        if images == ():  # not seen yet
            if len(shapes) >= CACHED:
                shapes.clear()
            images = shapes[shape] = shaped(values, memory)
        if images is None:
            return None
        pairs = zip(images, bases, strict=True)
        return b"".join(
            _with_address(image, values[base] + offset) for (image, offset), base in pairs
        )

    return maps


_TYPES = {
    "bf16": "BFLOAT16", "f16": "FLOAT16", "f32": "FLOAT32", "tf32": "TFLOAT32", "f8E4M3FN": "UINT8",
    "f8E5M2": "UINT8", "i8": "UINT8", "i16": "UINT16", "i32": "INT32",
}  # fmt: skip
_FILLS = {"zero": "NONE", "nan": "NAN_REQUEST_ZERO_FMA"}


def _encode(found: TensorMap, element: str) -> bytes:
    """MAP_BYTES from cuTensorMapEncodeTiled."""
    cuda = driver.bindings()
    type_ = getattr(cuda.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_TYPES[element]}")
    swizzle = getattr(cuda.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{found.swizzle}B")
    fill = getattr(
        cuda.CUtensorMapFloatOOBfill, f"CU_TENSOR_MAP_FLOAT_OOB_FILL_{_FILLS[found.fill]}"
    )
    made = driver.check(
        cuda.cuTensorMapEncodeTiled(
            type_,
            found.rank,
            found.address,
            [cuda.cuuint64_t(n) for n in found.dims],
            [cuda.cuuint64_t(n) for n in found.strides],
            [cuda.cuuint32_t(n) for n in found.box],
            [cuda.cuuint32_t(1)] * found.rank,
            cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            fill,
        ),
        "encoding a tensor map",
    )
    return ctypes.string_at(int(made.getPtr()), MAP_BYTES)


def _with_address(image: bytes, address: int) -> bytes:
    """An encoded map with another address."""
    room = (ctypes.c_char * (MAP_BYTES + _IMAGE_ALIGNMENT))()
    at = -(-ctypes.addressof(room) // _IMAGE_ALIGNMENT) * _IMAGE_ALIGNMENT
    ctypes.memmove(at, image, MAP_BYTES)
    code = driver.replace_address()(at, address)
    if code:
        driver.raise_error(code, "putting an address into a tensor map")
    return ctypes.string_at(at, MAP_BYTES)
