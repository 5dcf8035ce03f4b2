"""Running a compiled kernel: on the GPU that its arrays are on, or in the emulator on the CPU."""

from __future__ import annotations

import dataclasses
import math
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minitriton import dynamo, options
from minitriton.compiled import CompiledKernel
from minitriton.ir.target import Target
from minitriton.pointer_tables import pointed_to
from minitriton.runtime import driver, module
from minitriton.runtime.arguments import HOST, Argument, ArgumentError, Memory, memory_of
from minitriton.runtime.launch import (
    MAX_PROGRAMS,
    Maps,
    Place,
    make_launcher,
    normalize_grid,
    to_bytes,
)
from minitriton.runtime.tensor_maps import bounded, packed
from minitriton.specialize import Parameter, specialize

EMULATED_CTAS = 2  # of a persistent kernel at a time: most then run several programs
_loading = threading.Lock()


@dataclass(frozen=True, slots=True)
class HostAllocation:
    """A piece of host memory that a kernel may touch, as the emulator wants to know it."""

    address: int
    nbytes: int
    name: str
    writable: bool


def target_for(device: int | None, settings: options.Options) -> Target:
    """What to compile for: the GPU's architecture, or MINITRITON_TARGET for the emulator."""
    if device is None or device == HOST:
        return Target.parse(settings.target)
    return Target.for_capability(*driver.properties(device).capability)


def current_stream(device: int) -> int:
    """Raw handle of torch's current stream on a GPU; the default stream if torch has none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch._C._cuda_getCurrentRawStream(device))


def stream_getter() -> Callable[[int], int]:
    """The fastest function that does what `current_stream` does."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return current_stream
    found: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
    return found


def launcher(
    compiled: CompiledKernel, device: int, places: Sequence[Place], count: int, *, sync: bool
) -> Callable[..., None]:
    """A launch function on GPU `device` that packs the values at `places` in its `count`."""
    compiled.check_resources()
    shape = compiled.shape
    with _loading:
        function = compiled.functions.get(device)
        if function is None:
            function = module.load(
                compiled.assemble(), compiled.name, device, shape.shared, shape.threads
            )
            compiled.functions[device] = function
    if compiled.persistent:
        resident = module.resident_ctas(function, shape.threads, shape.shared, shape.clusters)
        if not resident:
            return launcher(compiled.without_clusters(), device, places, count, sync=sync)
        shape = dataclasses.replace(shape, resident=resident)
    dtypes = compiled.parameter_dtypes()

    def without() -> Callable[..., None]:
        return launcher(compiled.without_tma(), device, places, count, sync=sync)

    def alone() -> Callable[..., None]:
        return launcher(compiled.without_clusters(), device, places, count, sync=sync)

    maps = Maps(compiled.tensor_maps, without)
    return make_launcher(function, shape, dtypes, places, count, sync=sync, maps=maps, alone=alone)


def memory_getter(
    compiled: CompiledKernel, places: Sequence[Place]
) -> Callable[[Sequence[Any]], tuple[Any, ...]] | None:
    """A function of a launch's values: the memory that the launcher wants to know; None if it wants
    none. places: of the parameters in the values."""
    wanted = [places[number] for number in bounded(compiled.tensor_maps)]
    if not wanted:
        return None

    def memory(values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(memory_of(_at(values, place)) for place in wanted)

    return memory


def _at(values: Any, place: Place) -> Any:
    """The array that stands at a place, which may be in tuples or a tensor descriptor's base."""
    for index in place:
        values = values[index] if isinstance(values, tuple) else values.base
    return values


def run(
    compiled: CompiledKernel,
    device: int | None,
    grid: tuple[int, int, int],
    leaves: Sequence[tuple[str, Argument]],
    settings: options.Options,
) -> None:
    """Launch with `leaves` as the compiled function's parameters, in order."""
    if not all(grid):
        return
    if device is None or device == HOST:
        _emulate(compiled, grid, leaves, settings)
        return
    driver.check_alive()
    if settings.debug:
        _check_addresses(leaves, device)
    launch = compiled.launchers.get((device, settings.sync))
    if launch is None:
        places = [(i,) for i in range(len(leaves))]
        launch = launcher(compiled, device, places, len(leaves), sync=settings.sync)
        compiled.launchers[device, settings.sync] = launch
    values = [argument.value for _, argument in leaves]
    memory = memory_getter(compiled, [(i,) for i in range(len(leaves))])
    if memory is not None:
        values.append(memory(tuple(argument.owner for _, argument in leaves)))
    launch(*grid, current_stream(device), *values)


def _check_addresses(leaves: Sequence[tuple[str, Argument]], device: int) -> None:
    """Ask the driver who owns each address: finds memory freed behind a library's back."""
    for name, argument in leaves:
        if argument.kind == "array" and argument.value and not argument.pinned:
            try:
                owner = driver.device_of(argument.value)
            except driver.CudaError as error:
                raise ArgumentError(
                    f"argument '{name}': no GPU owns address {argument.value:#x} ({error.name})"
                ) from error
            if owner != device:
                raise ArgumentError(f"argument '{name}' is on cuda:{owner}, not cuda:{device}")


def _emulate(
    compiled: CompiledKernel,
    grid: tuple[int, int, int],
    leaves: Sequence[tuple[str, Argument]],
    settings: options.Options,
) -> None:
    compiled.check_resources()
    pieces = {
        number: (argument.memory.address, argument.memory.nbytes)
        for number, (_, argument) in enumerate(leaves)
        if argument.memory is not None
    }
    maps = packed(compiled.tensor_maps, [argument.value for _, argument in leaves], pieces)
    programs = math.prod(grid)
    counted = not compiled.persistent or programs <= MAX_PROGRAMS
    if maps is None or not counted or programs % compiled.shape.clusters:
        plain = compiled.without_clusters() if maps and counted else compiled.without_tma()
        _emulate(plain, grid, leaves, settings)
        compiled.report = plain.report
        return
    if settings.check_passes:
        _check_passes(compiled, grid, leaves)
    dtypes = compiled.parameter_dtypes()
    params = [
        to_bytes(dtype, argument.value) for dtype, (_, argument) in zip(dtypes, leaves, strict=True)
    ]
    ctas, shape = grid, compiled.shape
    if compiled.persistent:
        params += [to_bytes("int32", size) for size in grid]
        most = -(-EMULATED_CTAS // shape.clusters) * shape.clusters
        ctas = (min(programs, most), 1, 1)
    policies: dict[str, Any] = {}
    if shape.clusters > 1:
        policies["cluster"] = (shape.clusters, 1, 1)
    for name, value in (
        ("landing", settings.landing),
        ("schedule", settings.schedule),
        ("seed", settings.seed),
    ):
        if value:
            policies[name] = value
    if settings.check:
        names = tuple(name.strip() for name in settings.check.split(","))
        policies["checks"] = () if names == ("none",) else "all" if "all" in names else names
    compiled.report = compiled.emulator().launch(
        compiled.name,
        grid=ctas,
        block=(shape.threads, 1, 1),
        params=[*params, *maps],
        allocations=host_allocations(leaves, _pointed_to(compiled, leaves)),
        shared_bytes=compiled.shared,
        **policies,
    )


def _check_passes(
    compiled: CompiledKernel, grid: tuple[int, int, int], leaves: Sequence[tuple[str, Argument]]
) -> None:
    """InternalError naming the first tile pass after which the program does something else."""
    from minitriton.pass_check import check_stages

    pieces = host_allocations(leaves, _pointed_to(compiled, leaves))
    dtypes = []
    for piece in pieces:
        end = piece.address + piece.nbytes
        inside = [
            a.dtype for _, a in leaves if a.memory and piece.address <= a.memory.address < end
        ]
        dtypes.append(inside[0] if len(set(inside)) == 1 else "")
    stages = compiled.tile_texts()
    check_stages(compiled.name, stages, pieces, dtypes, [a.value for _, a in leaves], grid)


def _pointed_to(
    compiled: CompiledKernel, leaves: Sequence[tuple[str, Argument]]
) -> list[tuple[Memory, str]]:
    """Memory that the kernel may reach through integers that it makes pointers of."""
    return pointed_to(leaves) if "makes_pointers" in compiled.metadata else []


def host_allocations(
    leaves: Sequence[tuple[str, Argument]], further: Sequence[tuple[Memory, str]] = ()
) -> list[HostAllocation]:
    """The distinct pieces of host memory behind arrays; views of one piece are joined."""
    found: list[HostAllocation] = []
    pieces = [(a.memory, name) for name, a in leaves if a.memory is not None]
    pieces += further
    for memory, name in sorted(pieces, key=lambda piece: piece[0].address):
        piece = HostAllocation(memory.address, memory.nbytes, name, memory.writable)
        if found and piece.address < found[-1].address + found[-1].nbytes:
            last = found.pop()
            end = max(last.address + last.nbytes, piece.address + piece.nbytes)
            piece = HostAllocation(
                last.address,
                end - last.address,
                f"{last.name}, {name}",
                last.writable or piece.writable,
            )
        found.append(piece)
    return found


@dynamo.outside
def launch_compiled(compiled: CompiledKernel, grid: Any, values: Sequence[Any]) -> None:
    """Launch with the kernel's parameters in order; they must fit what was compiled."""
    parameters = [
        Parameter(
            spec.name,
            is_constexpr=spec.kind == "constexpr",
            dtype=spec.dtype if spec.kind == "scalar" else "",
            const=spec.const,
            specialize=spec.divisible,
        )
        for spec in compiled.spec.params
    ]
    if len(values) != len(parameters):
        names = ", ".join(parameter.name for parameter in parameters)
        raise ArgumentError(
            f"'{compiled.name}' takes {len(parameters)} arguments ({names}); got {len(values)}"
        )
    call = specialize(compiled.name, parameters, values, {})
    for wanted, got in zip(compiled.spec.params, call.spec.params, strict=True):
        if wanted.kind != "constexpr" and wanted.key_text() != got.key_text():
            raise ArgumentError(
                f"argument '{wanted.name}': compiled for {wanted.key_text()}, got {got.key_text()}"
            )
    settings = options.read()
    run(compiled, call.device, normalize_grid(grid, compiled.name), call.leaves, settings)
