"""Shared memory across a cluster: addresses that mapa made, the CTA each names, how CTAs lie.

A plain address names the CTA's own shared memory; a mapped one holds 1 + the rank of its CTA above
the offset. Clusters lie in the grid side by side, and CTAs count cluster by cluster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minitriton.runtime.emulator.checks import LaunchError, OutOfBounds
from minitriton.runtime.emulator.memory import error
from minitriton.runtime.emulator.module import (
    SHARED_WINDOW,
    WINDOW_SHIFT,
    Ins,
    Program,
    type_bytes,
)
from minitriton.runtime.emulator.operands import lanes_of, reader, writer

Step = Callable[[Any, Any], None]
Sizes = tuple[int, int, int]
_RANK_SHIFT = 24  # above every offset
_OFFSETS = (1 << _RANK_SHIFT) - 1
_PORTABLE = 8  # CTAs of a cluster that every GPU takes
_SPACES = frozenset({"shared", "shared::cta", "shared::cluster"})
_PLAIN = frozenset({"ld", "ldu", "st", "atom", "red"})


def cluster_sizes(program: Program, asked: Sequence[int] | None, grid: Sizes) -> Sizes | None:
    """The cluster that a launch has, None without; LaunchError for what a driver refuses."""
    facts = program.attributes
    if "blocksareclusters" in facts:
        raise LaunchError(f"{program.name}: .blocksareclusters is not supported")
    given = facts.get("reqnctapercluster")
    required = (*given, 1, 1)[:3] if given else None
    if asked is not None and required is not None and tuple(asked) != required:
        raise LaunchError(f"{program.name} requires clusters {required}, got {tuple(asked)}")
    sizes = required or asked
    if sizes is None:
        if "explicitcluster" in facts:
            hint = "pass cluster=(x, y, z) at the launch"
            raise LaunchError(f"{program.name} must be launched in clusters", hint=hint)
        return None
    x, y, z = sizes
    count, limit = x * y * z, min((_PORTABLE, *facts.get("maxclusterrank", ())))
    if min(sizes) < 1 or count > limit:
        raise LaunchError(f"clusters {tuple(sizes)} of {count} CTAs (limit {limit})")
    if any(n % k for n, k in zip(grid, sizes, strict=True)):
        raise LaunchError(f"grid {tuple(grid)} is no multiple of the cluster {tuple(sizes)}")
    return x, y, z


def _unravel(number: Any, sizes: Sequence[int]) -> tuple[Any, Any, Any]:
    return number % sizes[0], number // sizes[0] % sizes[1], number // (sizes[0] * sizes[1])


class Cluster:
    """Where the CTAs of a launch are, and their numbers in their clusters."""

    def __init__(self, grid: Sizes, sizes: Sizes) -> None:
        self.sizes, self.size = sizes, math.prod(sizes)
        self.across = tuple(n // k for n, k in zip(grid, sizes, strict=True))

    def of(self, number: Any) -> tuple[Any, Any, Any]:
        """Coordinates of the cluster of CTA ``number``, an int or an array of them."""
        return _unravel(number // self.size, self.across)

    def within(self, number: Any) -> tuple[Any, Any, Any]:
        return _unravel(number % self.size, self.sizes)

    def place(self, number: Any) -> tuple[Any, Any, Any]:
        """Coordinates of CTA ``number`` in the grid."""
        x, y, z = (
            k * a + b
            for k, a, b in zip(self.sizes, self.of(number), self.within(number), strict=True)
        )
        return x, y, z


def mapped(address: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """Addresses int64 of the same offsets in the CTAs of these ranks."""
    return address & _OFFSETS | rank.astype(np.int64) + 1 << _RANK_SHIFT


def _reaches_others(ins: Ins) -> bool:
    """Whether the instruction may name another CTA's shared memory."""
    return "shared::cluster" in ins.mods or (ins.op in _PLAIN and not _SPACES & set(ins.mods))


class ClusterMemory:
    """The shared memory of a chunk's clusters of more than one CTA."""

    def __init__(self, chunk: Any, size: int) -> None:
        self.c, self.size = chunk, size
        self.first = chunk.cta_of_lane // size * size

    def owner(self, lanes: np.ndarray, a: np.ndarray) -> np.ndarray:
        """The CTA of the chunk that each address names; beyond the cluster if there is none."""
        rank = (a >> _RANK_SHIFT) - 1
        return np.where(rank < 0, self.c.cta_of_lane[lanes], self.first[lanes] + rank)

    def locate(self, ins: Ins, ix: Any, a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(offset, CTA) of addresses int64 [lanes]."""
        c, lanes = self.c, lanes_of(self.c, ix)
        a = np.broadcast_to(a, lanes.shape)
        cta, own = self.owner(lanes, a), c.cta_of_lane[lanes]
        beyond = cta >= self.first[lanes] + self.size
        if beyond.any():
            message = f"shared address {int(a[beyond][0]):#x} is in no CTA of the cluster"
            raise error(OutOfBounds, ins, c, lanes[beyond], message)
        remote = cta != own
        if remote.any():
            if not _reaches_others(ins):
                message = f"{ins.op} cannot name the shared memory of another CTA here"
                hint = "only .shared::cluster and generic addresses reach other CTAs"
                raise error(OutOfBounds, ins, c, lanes[remote], message, hint)
            gone = remote & ~c.live.reshape(c.ctas, -1).any(1)[cta]
            if gone.any():
                message = f"shared memory of CTA {c.cta_name(int(cta[gone][0]))}, which has ended"
                hint = "all CTAs must pass a barrier.cluster after the last such access"
                raise error(OutOfBounds, ins, c, lanes[gone], message, hint)
        return np.where(a >> _RANK_SHIFT > 0, a & _OFFSETS, a), cta


def _to_shared(ins: Ins, c: Any, lanes: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Shared addresses int64 of an operand of mapa or getctarank."""
    value = np.broadcast_to(value, lanes.shape).astype(np.uint64)
    if not _SPACES & set(ins.mods):
        outside = value >> np.uint64(WINDOW_SHIFT) != SHARED_WINDOW >> WINDOW_SHIFT
        if outside.any():
            message = f"generic address {int(value[outside][0]):#x} is not in shared memory"
            raise error(OutOfBounds, ins, c, lanes[outside], message)
        value = value - np.uint64(SHARED_WINDOW)
    return value.view(np.int64)


def mapa(ins: Ins) -> Step:
    """mapa: the address of the same variable in another CTA of the cluster."""
    bits = 8 * type_bytes(ins.type)
    write, read = writer(ins, ins.ops[0], bits), reader(ins, ins.ops[1], bits)
    rank = reader(ins, ins.ops[2], 32)
    window = 0 if _SPACES & set(ins.mods) else SHARED_WINDOW

    def run(c: Any, ix: Any) -> None:
        lanes = lanes_of(c, ix)
        ranks = np.broadcast_to(rank(c, ix), lanes.shape)
        bad = ranks >= c.cluster.size
        if bad.any():
            count = "one" if c.cluster.size == 1 else str(c.cluster.size)
            message = f"mapa names CTA {int(ranks[bad][0])} beyond the cluster, which has {count}"
            raise error(OutOfBounds, ins, c, lanes[bad], message)
        if c.cluster.size == 1:
            write(c, ix, read(c, ix))
            return
        made = mapped(_to_shared(ins, c, lanes, read(c, ix)), ranks) | window
        write(c, ix, made.astype(f"u{bits // 8}"))

    return run


def getctarank(ins: Ins) -> Step:
    """getctarank: the rank of the CTA that an address of shared memory names."""
    bits = 8 * type_bytes(ins.type)
    write, read = writer(ins, ins.ops[0], 32), reader(ins, ins.ops[1], bits)

    def run(c: Any, ix: Any) -> None:
        lanes = lanes_of(c, ix)
        a, memory = _to_shared(ins, c, lanes, read(c, ix)), c.shared.cluster
        rank = np.zeros(1, np.int64)
        if memory is not None:
            rank = memory.owner(lanes, a) - memory.first[lanes]
        write(c, ix, rank.astype(np.uint32))

    return run


RULES: dict[str, Callable[[Ins], Step]] = {"mapa": mapa, "getctarank": getctarank}
