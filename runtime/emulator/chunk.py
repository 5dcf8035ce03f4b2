"""The CTAs that execute together: registers, memories, lanes and what they wait for."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minitriton.runtime.emulator.async_copy import CopyEngine
from minitriton.runtime.emulator.barriers import CtaBarriers
from minitriton.runtime.emulator.blocks import Blocks
from minitriton.runtime.emulator.bulk_copy import BulkEngine
from minitriton.runtime.emulator.cluster import ClusterBarrier
from minitriton.runtime.emulator.cluster_memory import Cluster, ClusterMemory, Sizes
from minitriton.runtime.emulator.mbarrier import Mbarriers
from minitriton.runtime.emulator.memory import Arena, GlobalMemory
from minitriton.runtime.emulator.module import Program
from minitriton.runtime.emulator.operands import UNSIGNED
from minitriton.runtime.emulator.races import RaceDetector
from minitriton.runtime.emulator.register_order import Unfenced
from minitriton.runtime.emulator.register_pool import Pool
from minitriton.runtime.emulator.uninit import UninitTracker
from minitriton.runtime.emulator.warpgroup import ProductEngine

#: Key of lanes that are not ready (parked or exited); larger than every pc.
NOT_READY = 1 << 40


@dataclass(slots=True)
class Launch:
    """What all chunks of a launch share."""

    program: Program
    blocks: Blocks
    memory: GlobalMemory
    params: np.ndarray
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    checks: frozenset[str]
    landing: str
    schedule: str
    rng: np.random.Generator
    output: Any
    granule: int = 4
    entry_undefined: tuple[int, ...] = ()
    unfenced: Unfenced = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    flops: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    steps: int = 0
    max_steps: int | None = None
    cluster: Sizes | None = None


class Chunk:
    """CTAs ``first .. first+ctas`` of the grid, one array element per lane.

    CTAs are counted cluster by cluster, and a cluster is never divided. Lanes of a CTA are padded
    to whole warps; padding lanes count as exited.
    """

    def __init__(self, launch: Launch, first: int, ctas: int) -> None:
        self.launch, self.first, self.ctas = launch, first, ctas
        self.grid = Cluster(launch.grid, launch.cluster or (1, 1, 1))
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        self.threads, self.padded = threads, (threads + 31) // 32 * 32
        self.L = ctas * self.padded
        self.all_lanes = np.arange(self.L)
        self.cta_of_lane = self.all_lanes // self.padded
        self.lane_in_warp = (self.all_lanes & 31).astype(np.uint32)
        self.live = self.all_lanes % self.padded < threads
        self.checks, self.landing, self.rng = launch.checks, launch.landing, launch.rng
        self.globals, self.params = launch.memory, launch.params
        self.bytes, self.flops = launch.bytes, launch.flops
        self._make_registers(launch.program)
        self.shared = Arena("shared", launch.shared_bytes, ctas, self.cta_of_lane)
        if self.grid.size > 1:
            self.shared.cluster = ClusterMemory(self, self.grid.size)
        self.local = Arena("local", launch.program.local_bytes, self.L, self.all_lanes)
        self.plans: dict[int, Any] = {}
        self.reducing: dict[int, Any] = {}
        self._special: dict[str, np.ndarray] = {}
        self.carry = np.zeros(self.L, bool)
        self.progress, self.clock, self.back_jumps = 0, 0, 0
        self.uniform = bool(self.live.all()) and launch.schedule == "round_robin"
        self.pc = 0
        self.key = np.where(self.live, 0, NOT_READY)
        self.lane_pc = np.zeros(self.L, np.int64)
        self.age = np.zeros(self.L >> 5, np.int64)
        #: By pc, what lanes parked there wait for. In an array of objects, which the garbage
        #: collector does not look into, it would keep the chunk for ever.
        self.parked_on: dict[int, Any] = {}
        self.race = RaceDetector(self) if "race" in self.checks else None
        self.uninit = UninitTracker(self) if "uninit" in self.checks else None
        self.barriers = CtaBarriers(self)
        #: Asynchronous engines by name; each lands its operations by the launch's policy.
        self.engines: dict[str, Any] = {
            "cp.async": CopyEngine(self),
            "wgmma": ProductEngine(self),
        }
        self.cluster, self.pool = ClusterBarrier(self, self.grid.size), Pool(self)
        if any(ins.op == "mbarrier" or "bulk" in ins.mods for ins in launch.program.code):
            self.mbarriers, self.engines["bulk"] = Mbarriers(self), BulkEngine(self)

    def _make_registers(self, program: Program) -> None:
        self.rows: list[np.ndarray] = [np.empty(0)] * len(program.registers)
        for bits, dtype in UNSIGNED.items():
            members = [r.index for r in program.registers if r.bits == bits]
            if not members:
                continue
            # A NaN-like pattern, so that a value nobody wrote is noticed.
            fill = False if bits == 1 else 0x7FFF7FFF7FFF7FFF & ((1 << bits) - 1)
            table = np.full((len(members), self.L), fill, dtype)
            for row, index in enumerate(members):
                self.rows[index] = table[row]

    # -- lanes
    def count(self, ix: Any) -> int:
        return self.L if ix is None else len(ix)

    def lane_in_warp_of(self, ix: Any) -> np.ndarray:
        return self.lane_in_warp if ix is None else self.lane_in_warp[ix]

    def cta_name(self, cta: int) -> tuple[int, int, int]:
        return self.grid.place(self.first + cta)

    def lane_name(self, lane: int) -> str:
        cta, thread = divmod(lane, self.padded)
        x, y, z = self.cta_name(cta)
        return f"CTA ({x},{y},{z}) warp {thread // 32} lane {thread % 32}"

    def live_in_warp(self) -> np.ndarray:
        return self.live.reshape(-1, 32).sum(1)

    def live_warp_lanes(self) -> np.ndarray:
        """Per CTA, 32 for each warp that has a live lane."""
        alive = self.live.reshape(self.ctas, -1, 32).any(2)
        return alive.sum(1) * 32

    def arrival_weight(self, lanes: np.ndarray) -> np.ndarray:
        """1 per lane; the lowest live lane of a warp also counts for the exited ones."""
        dead = 32 - self.live_in_warp()
        if not dead.any():
            return np.ones(len(lanes), np.int64)
        lowest = self.live.reshape(-1, 32).argmax(1)
        warp = lanes >> 5
        return 1 + np.where((lanes & 31) == lowest[warp], dead[warp], 0)

    # -- waiting
    def split(self) -> None:
        """Leave the state in which all lanes share one pc."""
        if self.uniform:
            self.uniform = False
            self.key[:] = self.pc
            self.age[:] = 0

    def park(self, lanes: np.ndarray, pc: int, waits_for: Any) -> None:
        """Take lanes at ``pc`` off the ready set until `unpark`."""
        self.split()
        self.lane_pc[lanes] = pc
        self.key[lanes] = NOT_READY
        self.parked_on[pc] = waits_for

    def unpark(self, lanes: np.ndarray, retry: bool = False) -> None:
        """Make parked lanes ready after (or, with ``retry``, at) their instruction."""
        if len(lanes):
            self.key[lanes] = self.lane_pc[lanes] + (0 if retry else 1)

    def exit(self, lanes: np.ndarray) -> None:
        self.live[lanes] = False
        self.key[lanes] = NOT_READY
        self.progress += 1
        for waited_for in (self.barriers, self.cluster, self.pool, self.engines["wgmma"]):
            waited_for.recheck()
        if "bulk" in self.engines:
            self.engines["bulk"].exited()
        if self.grid.size > 1 and self.race is not None:
            ctas = np.unique(self.cta_of_lane[lanes])
            self.race.ended(ctas[~self.live.reshape(self.ctas, -1)[ctas].any(1)])

    def release(self) -> None:
        """Frees the chunk's memory at once: its parts know it, so that else it waits for the
        garbage collector. Nothing of the chunk may be used afterwards."""
        self.__dict__.clear()

    def land_needed(self) -> bool:
        """Land asynchronous copies that parked lanes wait for; whether there were any."""
        return "bulk" in self.engines and self.engines["bulk"].land_needed()

    # -- services
    def atomic_order(self, count: int) -> np.ndarray | None:
        """A permutation of the lanes of an atomic, None for lane order."""
        if self.launch.schedule == "random":
            return self.rng.permutation(count)
        return np.arange(count)[::-1].copy() if self.launch.schedule == "reverse" else None

    def print(self, text: str) -> None:
        self.launch.output.write(text)

    def special(self, name: str) -> np.ndarray:
        """A special register: uint32 or uint64, shape [L] or (1,)."""
        if name in ("clock", "clock64", "clock_hi", "globaltimer", "globaltimer_lo"):
            self.clock += 1
            value = self.clock >> 32 if name == "clock_hi" else self.clock
            wide = name in ("clock64", "globaltimer")
            return np.array([value if wide else value & 0xFFFFFFFF], "u8" if wide else "u4")
        row = self._special.get(name)
        if row is None:
            row = self._special[name] = self._make_special(name)
        return row

    def _make_special(self, name: str) -> np.ndarray:
        head, _, axis = name.partition(".")
        k = "xyz".find(axis) if axis else 0
        grid, block = self.launch.grid, self.launch.block
        thread = self.all_lanes % self.padded
        cta = self.cta_of_lane + self.first
        lane = self.all_lanes & 31
        if head == "tid":
            divisor = (1, block[0], block[0] * block[1])[k]
            return (thread // divisor % block[k]).astype(np.uint32)
        places = {"ctaid": self.grid.place, "clusterid": self.grid.of}
        places["cluster_ctaid"] = self.grid.within
        if head in places:
            return places[head](cta)[k].astype(np.uint32)
        masks = {"eq": 1 << lane, "lt": (1 << lane) - 1, "le": (2 << lane) - 1}
        masks |= {"ge": 0xFFFFFFFF & ~masks["lt"], "gt": 0xFFFFFFFF & ~masks["le"]}
        if head.startswith("lanemask_"):
            return masks[head[9:]].astype(np.uint32)
        uniform = {
            "ntid": block[k],
            "nctaid": grid[k],
            "nclusterid": self.grid.across[k],
            "cluster_nctaid": self.grid.sizes[k],
            "cluster_nctarank": self.grid.size,
            "is_explicit_cluster": self.launch.cluster is not None,
            "nwarpid": self.padded // 32,
            "smid": 0,
            "nsmid": 132,
            "gridid": 0,
            "total_smem_size": self.launch.shared_bytes,
            "aggr_smem_size": self.launch.shared_bytes,
            "dynamic_smem_size": self.launch.shared_bytes - self.launch.program.static_shared,
        }
        if head in uniform:
            return np.array([uniform[head]], np.uint32)
        rows = {"laneid": lane, "warpid": thread // 32, "cluster_ctarank": cta % self.grid.size}
        return rows[head].astype(np.uint32)
