"""The emulator's entry points: `Emulator(ptx).launch(...)`.

An Emulator owns the module's global variables (they live as long as it does, as on a device),
and per entry the decoded program with its compiled runs, so keep and reuse it.
"""

from __future__ import annotations

import math
import struct
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import numpy as np

from minitriton.runtime.emulator import numerics
from minitriton.runtime.emulator.blocks import Blocks
from minitriton.runtime.emulator.checks import Deadlock, LaunchError, UnsupportedPTX, selected
from minitriton.runtime.emulator.chunk import Chunk, Launch
from minitriton.runtime.emulator.cluster_memory import cluster_sizes
from minitriton.runtime.emulator.counters import Report, collect
from minitriton.runtime.emulator.decode import decode_all
from minitriton.runtime.emulator.flatten import flatten
from minitriton.runtime.emulator.memory import Allocation, GlobalMemory, error
from minitriton.runtime.emulator.module import (
    Program,
    align_up,
    initial_bytes,
    type_bytes,
)
from minitriton.runtime.emulator.parser import parse
from minitriton.runtime.emulator.register_order import Unfenced, unfenced_products
from minitriton.runtime.emulator.scheduler import Scheduler, describe_state
from minitriton.runtime.emulator.syntax import Tree
from minitriton.runtime.emulator.uninit import maybe_undefined

LANDINGS = ("late", "early", "random")
SCHEDULES = ("round_robin", "reverse", "random")
#: Bytes of registers, and of shared memory, that a chunk may take (registers should stay in L2).
_REGISTER_BYTES = 24 << 20
_SHARED_BYTES = 64 << 20
_MAX_LANES, _MIN_LANES = 4096, 512
_MAX_LIVE_CHUNKS = 64


@dataclass(slots=True)
class _Entry:
    program: Program
    blocks: Blocks
    register_bytes: int
    granule: int
    undefined: tuple[int, ...] | None = None
    unfenced: Unfenced | None = None


class Emulator:
    """A loaded PTX module.

    ``Emulator(ptx_text)`` parses and decodes every entry; `UnsupportedPTX` names the PTX line of
    anything that cannot be executed.
    """

    def __init__(self, ptx: str) -> None:
        tree, lines = parse(ptx), ptx.splitlines()
        self._variables: list[np.ndarray] = []
        self._module_allocations: list[Allocation] = []
        addresses = self._allocate_variables(tree)
        self.entries: dict[str, _Entry] = {}
        for decl in tree.functions:
            if decl.is_entry and decl.body is not None:
                program = flatten(tree, decl.name, addresses, lines)
                self.entries[decl.name] = _make_entry(program)

    def _allocate_variables(self, tree: Tree) -> dict[str, int]:
        addresses: dict[str, int] = {}
        images: list[tuple[Any, np.ndarray]] = []
        for variable in tree.variables:
            if variable.space not in ("global", "const"):
                continue
            size = type_bytes(variable.type) * (variable.count or 1)
            align = max(16, variable.align)
            storage = np.zeros(size + align, np.uint8)
            self._variables.append(storage)
            start = align_up(storage.ctypes.data, align)
            skip = start - storage.ctypes.data
            addresses[variable.name] = start
            writable = variable.space == "global"
            self._module_allocations.append(Allocation(start, size, variable.name, writable))
            images.append((variable, storage[skip : skip + size]))
        for variable, target in images:
            image = initial_bytes(variable, addresses)[: len(target)]
            target[: len(image)] = np.frombuffer(image, np.uint8)
        return addresses

    def launch(
        self,
        entry: str,
        *,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        params: Sequence[bytes],
        allocations: Sequence[Allocation] = (),
        shared_bytes: int = 0,
        checks: tuple[str, ...] | str = "all",
        landing: str = "late",
        schedule: str = "round_robin",
        seed: int = 0,
        stdout: TextIO | None = None,
        max_steps: int | None = None,
        cluster: tuple[int, int, int] | None = None,
    ) -> Report:
        """Run a kernel to completion and return its counters.

        ``params`` holds the bytes of each kernel parameter (short values are zero-extended);
        ``shared_bytes`` is the dynamic shared memory on top of the static arrays. ``landing``
        says when asynchronous copies take effect, ``schedule`` in which order warps (and lanes
        of atomics) run. ``cluster`` is the launch attribute: CTAs of a cluster along each axis.
        Raises an `EmulatorError` at the first finding.
        """
        found = self._find(entry)
        _check_launch(found.program, grid, block, landing, schedule)
        chosen = selected(checks)
        if "uninit" in chosen and found.undefined is None:
            found.undefined = maybe_undefined(found.program)
        if "race" in chosen and found.unfenced is None:
            found.unfenced = unfenced_products(found.program)
        launch = Launch(
            program=found.program,
            blocks=found.blocks,
            memory=GlobalMemory([*allocations, *self._module_allocations]),
            params=_pack_params(found.program, params),
            grid=(grid[0], grid[1], grid[2]),
            block=(block[0], block[1], block[2]),
            shared_bytes=found.program.static_shared + shared_bytes,
            checks=chosen,
            landing=landing,
            schedule=schedule,
            rng=np.random.default_rng(seed),
            output=sys.stdout if stdout is None else stdout,
            granule=found.granule,
            entry_undefined=found.undefined or (),
            unfenced=found.unfenced if "race" in chosen and found.unfenced else {},
            max_steps=max_steps,
            cluster=cluster_sizes(found.program, cluster, grid),
        )
        try:
            with numerics.quiet():
                chunks = _run_chunks(launch, found)
        finally:  # what a failed launch counted is not for the next one's report
            report = collect(found.blocks, launch.bytes, launch.flops)
        report.steps, report.chunks = launch.steps, chunks
        return report

    def _find(self, entry: str) -> _Entry:
        if entry not in self.entries:
            raise LaunchError(
                f"no entry {entry!r} in the module", hint=f"it has {', '.join(self.entries)}"
            )
        return self.entries[entry]


def _make_entry(program: Program) -> _Entry:
    register_bytes = sum(max(1, r.bits // 8) for r in program.registers)
    sizes = [4]
    for ins in program.code:
        shared = any(m.split("::")[0] == "shared" for m in ins.mods)
        generic = ins.op in ("ld", "st") and not ({"global", "local", "param"} & set(ins.mods))
        if ins.op in ("ld", "st", "atom", "red") and (shared or generic):
            sizes.append(type_bytes(ins.type))
        if ins.op == "stmatrix" and "trans" in ins.mods:
            sizes.append(2)
    return _Entry(program, Blocks(program, decode_all(program)), register_bytes, min(sizes))


def _check_launch(
    program: Program, grid: Sequence[int], block: Sequence[int], landing: str, schedule: str
) -> None:
    if len(grid) != 3 or len(block) != 3 or min(*grid, *block) < 0 or min(block) < 1:
        raise LaunchError(f"grid {tuple(grid)} and block {tuple(block)} must be three counts")
    threads = block[0] * block[1] * block[2]
    if threads > 1024:
        raise LaunchError(f"{threads} threads per CTA (limit 1024)")
    if grid[0] > 2**31 - 1 or grid[1] > 65535 or grid[2] > 65535:
        raise LaunchError(f"grid {tuple(grid)} exceeds (2147483647, 65535, 65535)")
    required = program.attributes.get("reqntid")
    if required:
        wanted = (*required, 1, 1)[:3]
        if tuple(block) != tuple(wanted):
            raise LaunchError(f"{program.name} requires block {wanted}, got {tuple(block)}")
    if landing not in LANDINGS or schedule not in SCHEDULES:
        raise LaunchError(f"landing is one of {LANDINGS}, schedule one of {SCHEDULES}")


def _pack_params(program: Program, params: Sequence[bytes]) -> np.ndarray:
    if len(params) != len(program.params):
        raise LaunchError(
            f"{program.name} takes {len(program.params)} parameters, {len(params)} given"
        )
    image = bytearray(program.param_bytes)
    for slot, value in zip(program.params, params, strict=True):
        if len(value) > slot.nbytes:
            raise LaunchError(f"parameter {slot.name} is {slot.nbytes} bytes, {len(value)} given")
        image[slot.offset : slot.offset + len(value)] = value
    return np.frombuffer(bytes(image), np.uint8)


def _chunk_size(launch: Launch, entry: _Entry, total: int) -> int:
    threads = launch.block[0] * launch.block[1] * launch.block[2]
    padded = align_up(threads, 32)
    lanes = _REGISTER_BYTES // max(1, entry.register_bytes)
    lanes = min(_MAX_LANES, max(_MIN_LANES, lanes))
    by_shared = _SHARED_BYTES // max(1, launch.shared_bytes)
    together = math.prod(launch.cluster or (1,))
    return max(1, min(total, lanes // padded, by_shared) // together) * together


def _run_chunks(launch: Launch, entry: _Entry) -> int:
    """Run all CTAs, chunk by chunk; a chunk that spins lets later ones run meanwhile."""
    total = launch.grid[0] * launch.grid[1] * launch.grid[2]
    if total == 0:
        return 0
    size = _chunk_size(launch, entry, total)
    pending = _starts(launch, total, size)
    spinning: deque[Scheduler] = deque()
    seen: dict[int, set[bytes]] = {}
    started = 0
    while True:
        first = next(pending, None) if len(spinning) < _MAX_LIVE_CHUNKS else None
        if first is not None:
            started += 1
            scheduler = Scheduler(Chunk(launch, first, min(size, total - first)))
        elif spinning:
            scheduler = spinning.popleft()
        else:
            return started
        before = scheduler.c.progress
        if scheduler.run():
            scheduler.c.release()
            seen.clear()
            continue
        spinning.append(scheduler)
        if scheduler.c.progress != before:
            seen.clear()
        elif first is None:
            _refuse_stuck(launch, spinning, seen)


def _starts(launch: Launch, total: int, size: int) -> Iterator[int]:
    starts = list(range(0, total, size))
    if launch.schedule == "reverse":
        starts.reverse()
    elif launch.schedule == "random":
        launch.rng.shuffle(starts)
    return iter(starts)


def _refuse_stuck(launch: Launch, spinning: deque[Scheduler], seen: dict[int, set[bytes]]) -> None:
    """Raise when every chunk has come back to a state it was in before, nothing having changed."""
    current = spinning[-1]
    states = seen.setdefault(current.c.first, set())
    state = describe_state(current.c)
    repeated = state in states
    states.add(state)
    if not repeated or len(seen) < len(spinning):
        return
    c = current.c
    pc = c.pc if c.uniform else int(c.key.min())
    ins = launch.program.code[pc]
    message = "all CTAs spin on memory that nobody will change"
    hint = "check the order of lock, semaphore or flag operations between CTAs"
    raise error(Deadlock, ins, c, np.flatnonzero(c.live), message, hint)


def parameter(value: Any, type_name: str = "u64") -> bytes:
    """The bytes of a scalar kernel parameter, e.g. ``parameter(5, "u32")``."""
    codes = {"f32": "<f", "f64": "<d"}
    if type_name in codes:
        return struct.pack(codes[type_name], value)
    size = type_bytes(type_name)
    return (int(value) & ((1 << 8 * size) - 1)).to_bytes(size, "little")


__all__ = ["Allocation", "Emulator", "Report", "UnsupportedPTX", "parameter"]
