"""The launch path: one `struct` call writes grid, stream and parameters into a block made once.

`make_launcher` writes a small Python function per compiled kernel. It calls cuLaunchKernelEx
through ctypes with four addresses: cuda.bindings would convert eleven arguments one by one and
build enum objects of the result, which costs more than the rest of the path together. The GIL is
released inside, so a block must belong to one launch at a time: blocks come from a free list.
Each parameter sits in a slot of 8 bytes, zero-filled, and the driver reads as much as it needs;
tensor maps follow, 128 bytes each. A launch that no tensor map fits goes to another kernel, and so
does one of clusters whose programs do not come in twos.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minitriton.ir.diagnostics import MiniTritonError
from minitriton.runtime import driver
from minitriton.runtime.module import Function
from minitriton.runtime.tensor_map import MAP_BYTES
from minitriton.runtime.tensor_maps import bounded, encoder, needed

MAX_GRID = (2**31 - 1, 65535, 65535)
_SLOT = {
    "int1": "?7x", "int8": "b7x", "int16": "h6x", "int32": "i4x", "int64": "q",
    "uint8": "B7x", "uint16": "H6x", "uint32": "I4x", "uint64": "Q",
    "fp16": "e6x", "bf16": "H6x", "fp32": "f4x", "fp64": "d",
}  # fmt: skip
_WIDTH = {"int1": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "fp16": 2, "bf16": 2,
          "int32": 4, "uint32": 4, "fp32": 4, "int64": 8, "uint64": 8, "fp64": 8}  # fmt: skip
POINTER = "*"
# Of a persistent kernel, which counts in 32 bits, up to one step of all its CTAs past the last.
MAX_PROGRAMS = 2**31 - 2**16


@dataclass(frozen=True, slots=True)
class Maps:
    """The tensor maps of a kernel (specs), and what makes the launcher of its form without any, for
    launches whose values no map can describe."""

    specs: Sequence[dict[str, Any]]
    without: Callable[[], Callable[..., None]]


def _never() -> Callable[..., None]:
    raise AssertionError("a kernel without tensor maps or clusters needs no other form")


NO_MAPS = Maps((), _never)
Place = tuple[int, ...]  # the index of a launcher's value, then an index for each level of tuples


class LaunchError(MiniTritonError, ValueError):
    """A launch was refused: the grid or an argument is out of range."""


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """What stays the same over all launches of a compiled kernel."""

    threads: int
    shared: int  # dynamic, in bytes
    clusters: int = 1  # CTAs per cluster, along x
    cooperative: bool = False
    programmatic: bool = False  # may start before the previous kernel in the stream has ended
    resident: int = 0  # CTAs to launch at most, of a persistent kernel; 0: one for each program


def slot_format(dtypes: Sequence[str]) -> str:
    """`struct` format of the parameter slots; `dtypes` are scalar names or POINTER."""
    return "".join("Q" if d == POINTER else _SLOT[d] for d in dtypes)


def to_bytes(dtype: str, value: Any) -> bytes:
    """One parameter in exactly its own width, as the emulator takes it."""
    if dtype == POINTER:
        return struct.pack("<Q", value)
    code = _SLOT[dtype][0]
    data = struct.pack("<" + code, bfloat16_bits(value) if dtype == "bf16" else value)
    return data[: _WIDTH[dtype]]


def bfloat16_bits(value: float) -> int:
    """The 16 bits of `value` rounded to the nearest bfloat16, ties to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    if bits & 0x7FFFFFFF > 0x7F800000:
        return (bits >> 16) | 0x40  # keep a NaN a NaN
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def normalize_grid(grid: Any, kernel: str) -> tuple[int, int, int]:
    """`grid` as three ints; LaunchError unless it is one to three ints within the GPU's limits."""
    if isinstance(grid, int):
        grid = (grid,)
    try:
        sizes = tuple(grid)
    except TypeError:
        got = f"{type(grid).__name__} {grid!r}"
        raise LaunchError(
            f"the grid of '{kernel}' must be a tuple of 1 to 3 ints, or a function of the "
            f"arguments that returns one; got {got}"
        ) from None
    if not 1 <= len(sizes) <= 3:
        raise LaunchError(f"the grid of '{kernel}' must have 1 to 3 sizes; got {sizes!r}")
    out = [1, 1, 1]
    for axis, size in enumerate(sizes):
        number = size if type(size) is int else _index(size, axis, kernel)
        if not 0 <= number <= MAX_GRID[axis]:
            raise LaunchError(
                f"grid[{axis}] of '{kernel}' is {number}; it must be within 0 and {MAX_GRID[axis]}"
            )
        out[axis] = number
    return out[0], out[1], out[2]


def _index(size: Any, axis: int, kernel: str) -> int:
    """A size of a grid that is no plain int, as one."""
    if isinstance(size, bool) or not hasattr(size, "__index__"):
        got = f"{type(size).__name__} {size!r}"
        hint = "; use // or triton.cdiv" if isinstance(size, float) else ""
        raise LaunchError(f"grid[{axis}] of '{kernel}' must be an int; got {got}{hint}")
    return int(size.__index__())


# CUlaunchConfig: grid, block, dynamic shared bytes, stream, attributes, number of attributes.
_CONFIG = "7I4xQQI4x"
_CONFIG_BYTES = struct.calcsize("<" + _CONFIG)
# CUlaunchAttribute: an id, then a value of 64 bytes of which we set up to three ints.
_ATTRIBUTE = "<I4x3I52x"
_CLUSTER, _COOPERATIVE, _PROGRAMMATIC = 4, 2, 6

_TEMPLATE = """
def launch(gx, gy, gz, stream{parameters}{memory}):
    if multiple and not is_current(device):
        return elsewhere(gx, gy, gz, stream{parameters}{memory})
    {maps}
    {ctas}
    try:
        block = pop()
    except IndexError:
        block = new_block()
    data, config, addresses, attributes, _ = block
    {place_maps}
    pack_into(data, 0, {grid}, {threads}, 1, 1, {shared}, stream, attributes, {count}{values})
    recent(name)
    code = launch_ex(config, handle, addresses, None)
    push(block)
    if code:
        return failed(code, gx, gy, gz, stream{parameters}{memory})
    {after}
"""


def make_launcher(
    function: Function,
    shape: LaunchShape,
    dtypes: Sequence[str],
    places: Sequence[Place],
    count: int,
    *,
    sync: bool = False,
    launch_ex: Callable[..., int] | None = None,
    multiple: bool | None = None,
    maps: Maps = NO_MAPS,
    alone: Callable[[], Callable[..., None]] = _never,
) -> Callable[..., None]:
    """A function `launch(gx, gy, gz, stream, v0, ..., v{count-1})`.

    It packs the values at `places` as `dtypes` and launches on the raw `stream` (in tests by
    `launch_ex`). `maps` are made of the values, and of a further argument `memory` (a tuple) if
    they depend on it (`bounded`); they are passed after the values, like a persistent kernel's grid
    sizes. `alone` makes what launches it without clusters. Raises CudaError; with `sync` also what
    the kernel met.
    """
    launch_ex = driver.launch_function() if launch_ex is None else launch_ex
    pool: list[tuple[Any, ...]] = []
    attributes = _attributes(shape)
    sizes = ["int32"] * 3 if shape.resident else []

    def new_block() -> tuple[Any, ...]:
        return _new_block(len(dtypes) + len(sizes), len(maps.specs), attributes)

    def failed(code: int, *arguments: Any) -> None:
        _retry_or_raise(code, function, launch, arguments)

    def elsewhere(*arguments: Any) -> None:
        """Launch on a GPU that is not the current one, and put the current one back."""
        cuda = driver.bindings()
        previous = driver.check(cuda.cuCtxGetCurrent())
        driver.make_current(function.device)
        try:
            launch(*arguments)
        finally:
            driver.check(cuda.cuCtxSetCurrent(previous))

    def wait() -> None:
        driver.check(driver.bindings().cuCtxSynchronize(), f"running '{function.name}'")

    scope: dict[str, Any] = {
        "multiple": driver.device_count() > 1 if multiple is None else multiple,
        "is_current": driver.is_current, "device": function.device, "elsewhere": elsewhere,
        "pop": pool.pop, "push": pool.append, "new_block": new_block, "failed": failed,
        "pack_into": struct.Struct("<" + _CONFIG + slot_format([*dtypes, *sizes])).pack_into,
        "handle": ctypes.c_void_p(int(function.handle)),
        "recent": driver.STATE.recent.append, "name": function.name, "wait": wait,
        "to_bf16": bfloat16_bits, "launch_ex": launch_ex, "alone": functools.cache(alone),
    }  # fmt: skip
    found = ["v" + "".join([str(i), *(f"[{j}]" for j in rest)]) for i, *rest in places]
    memory = ", memory" if bounded(maps.specs) else ""
    text = _TEMPLATE.format(
        **_map_code(maps, scope, found, count, len(sizes), memory),
        **_grid_code(shape, count, memory),
        memory=memory,
        parameters="".join(f", v{i}" for i in range(count)),
        values="".join(", " + value for value in _values(dtypes, found, len(sizes))),
        threads=shape.threads,
        shared=shape.shared,
        count=len(attributes) // struct.calcsize(_ATTRIBUTE),
        after="wait()" if sync else "",
    )
    exec(compile(text, f"<launcher of {function.name}>", "exec"), scope)
    launch: Callable[..., None] = scope["launch"]
    return launch


def _values(dtypes: Sequence[str], found: Sequence[str], sizes: int) -> list[str]:
    """What is packed: parameters, then so many of the grid's sizes."""
    pairs = zip(dtypes, found, strict=True)
    values = [f"to_bf16({value})" if dtype == "bf16" else value for dtype, value in pairs]
    return [*values, *("gx", "gy", "gz")[:sizes]]


def _map_code(
    maps: Maps, scope: dict[str, Any], found: Sequence[str], count: int, sizes: int, memory: str
) -> dict[str, str]:
    """What the launcher does about tensor maps; `scope` gets the functions that it calls. memory:
    a further argument that they depend on."""
    if not maps.specs:
        return {"maps": "pass", "place_maps": "pass"}
    scope |= {"encode": encoder(maps.specs, len(found)), "otherwise": functools.cache(maps.without)}
    needs = ", ".join(found[number] for number in needed(maps.specs)) + memory
    arguments = "".join(f", v{i}" for i in range(count))
    start = _CONFIG_BYTES + 8 * (len(found) + sizes)
    return {
        "maps": f"maps = encode({needs})\n    if maps is None:\n"
        f"        return otherwise()(gx, gy, gz, stream{arguments})",
        "place_maps": f"data[{start}:{start + MAP_BYTES * len(maps.specs)}] = maps",
    }


def _grid_code(shape: LaunchShape, count: int, memory: str) -> dict[str, str]:
    """How many CTAs the launcher starts: one for each program, or as many as there is room for.
    memory: a further argument of the launcher without clusters."""
    if not shape.resident:
        return {"ctas": "pass", "grid": "gx, gy, gz"}
    arguments = "".join(f", v{i}" for i in range(count))
    unpaired = ""
    if shape.clusters > 1:
        unpaired = f"    if ctas % {shape.clusters}:\n"
        unpaired += f"        return alone()(gx, gy, gz, stream{arguments}{memory})\n"
    return {
        "ctas": f"ctas = gx * gy * gz\n    if ctas > {MAX_PROGRAMS}:\n"
        f"        return otherwise()(gx, gy, gz, stream{arguments})\n{unpaired}"
        f"    if ctas > {shape.resident}:\n        ctas = {shape.resident}",
        "grid": "ctas, 1, 1",
    }


def _new_block(count: int, maps: int, attributes: bytes) -> tuple[Any, ...]:
    """(memory, config, array of slot addresses, address of attributes, what must stay alive)."""
    values = _CONFIG_BYTES + 8 * count
    memory = bytearray(values + MAP_BYTES * maps)
    view = (ctypes.c_char * len(memory)).from_buffer(memory)
    base = ctypes.addressof(view)
    slots = [base + _CONFIG_BYTES + 8 * i for i in range(count)]
    slots += [base + values + MAP_BYTES * i for i in range(maps)]
    pointers = (ctypes.c_void_p * max(len(slots), 1))(*slots)
    copy = ctypes.create_string_buffer(attributes, max(len(attributes), 1))
    place = ctypes.addressof(copy) if attributes else 0
    addresses = ctypes.c_void_p(ctypes.addressof(pointers))
    return memory, ctypes.c_void_p(base), addresses, place, (view, pointers, copy)


def _attributes(shape: LaunchShape) -> bytes:
    """The array of CUlaunchAttribute for clusters, cooperation and programmatic overlap."""
    wanted = [
        (_CLUSTER, shape.clusters > 1, (shape.clusters, 1, 1)),
        (_COOPERATIVE, shape.cooperative, (1, 0, 0)),
        (_PROGRAMMATIC, shape.programmatic, (1, 0, 0)),
    ]
    return b"".join(struct.pack(_ATTRIBUTE, id_, *value) for id_, on, value in wanted if on)


def _retry_or_raise(
    code: int, function: Function, launch: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    """A thread that never used CUDA has no context yet: give it one and try again."""
    if code == driver.INVALID_CONTEXT and not driver.is_current(function.device):
        driver.make_current(function.device)
        launch(*arguments)
        return
    driver.raise_error(code, f"launching '{function.name}' with grid {arguments[:3]}")
