"""Tiles and slices of K for a matrix product: the cheapest by a model of an SM with wgmma.

A tile of rows x columns costs, in clocks of an SM,

    products  = max(rows * columns * k / RATE, (rows + columns) * k * size / L2_BYTES)
    epilogue  = EPILOGUE * rows * columns / 1024, by what it does
    tile      = products + epilogue, or with two warpgroups that take turns (ping-pong)
                max(products, (products + epilogue) / 2) + TURN

and all of them ceil(tiles * slices / SMs) times that, but no less than memory takes for A and B.
Slices of K add what it takes to write and sum their partial results. So long K and many tiles lead
to 128 x 192 in turns, or 128 x 256 where its tiles come out even on the SMs; short K to tiles in
turns; few rows or columns to narrow tiles, which stream the long operand through all SMs.

Elsewhere (mma.sync; operands that TMA cannot copy) the largest tile that keeps the SMs busy.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from minitriton import cdiv, next_power_of_2

FEW_ROWS = 64  # up to here, a product takes as long as B takes to read
SPLIT_K = 512  # no slice of K is shorter
GROUP_M = 8
# Multiply-adds of an SM in a clock by the bytes of an element, of which fp32 in two parts has 8.
RATE = {2: 2048, 4: 1024, 8: 341}
L2_BYTES = 61  # that reach an SM in a clock
MEMORY_BYTES = 2500  # that memory delivers in a clock to all SMs
SUM_CLOCKS = 4000  # of the kernel that sums slices, beside its bytes
TURN = 600  # clocks between the products of two warpgroups
# Clocks for 1024 elements. "reads": a matrix as large as C; "exact": GELU or reading in fp16 or
# fp32, where they take more registers and time, but for GELU alone in fp32; "thrice": any, after
# three products of tf32.
EPILOGUE = {
    "none": 92, "gelu": 220, "gelu fp32": 300, "reads": 300, "exact": 400, "thrice": 400,
}  # fmt: skip


@dataclass(frozen=True)
class Tile:
    """One choice for wgmma; depth: bytes of K that a stage holds; ctas: programs side by side that
    share copies. Tiles of 4 warps take turns if a stage has enough products
    (`passes/warp_split.py`), which all here but the last one have."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    ctas: int = 1

    def config(self, size: int) -> dict[str, int]:
        """For operands of `size` bytes an element."""
        return {
            "BLOCK_M": self.rows, "BLOCK_N": self.columns, "BLOCK_K": self.depth // size,
            "GROUP_M": GROUP_M, "num_warps": self.warps, "num_stages": self.stages,
            "num_ctas": self.ctas,
        }  # fmt: skip


_NARROW = (Tile(128, 64, 256, 4, 4), Tile(64, 128, 256, 4, 4), Tile(64, 64, 256, 4, 3))
# By the kind of epilogue. ptxas spills none of them (but for GELU's derivative after a bias). Fewer
# stages leave room for the store by TMA, and for a matrix that is read.
TILES = {
    "none": (Tile(128, 256, 128, 8, 4), Tile(128, 192, 128, 4, 5), Tile(128, 128, 128, 4, 6),
             *_NARROW),
    "gelu": (Tile(128, 256, 128, 8, 4), Tile(128, 128, 128, 4, 4),
             *(replace(tile, stages=3) for tile in _NARROW)),
    "gelu fp32": (Tile(128, 128, 128, 4, 4), *(replace(tile, stages=3) for tile in _NARROW)),
    "reads": (Tile(128, 128, 128, 4, 4), *(replace(tile, stages=3) for tile in _NARROW)),
    "exact": (Tile(128, 128, 128, 8, 4), *(replace(tile, stages=3) for tile in _NARROW)),
    "thrice": (Tile(128, 128, 128, 8, 3),),
}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """A launch configuration and how K is cut: `slices` of `depth`, the last one maybe shorter."""

    config: dict[str, int]
    slices: int
    depth: int


@functools.lru_cache(maxsize=4096)
def plan(
    m: int, n: int, k: int, strides: tuple[int, ...], element: torch.dtype, out: torch.dtype,
    processors: int, epilogue: str, warpgroups: bool,
) -> Plan:  # fmt: skip
    """For C [m, n] = A [m, k] B [k, n]. Callers share the result, and do not change it.

    strides: of A and B; element, out: types of A and B, of C; processors: SMs; epilogue: "none",
    "gelu", "reads" or "thrice"; warpgroups: whether products run on wgmma.
    """
    size = element.itemsize
    odd = any(stride != 1 and stride % 16 for stride in strides)  # goes element by element
    if m <= FEW_ROWS and size == 2 and not odd:
        return _cut(k, *_few_rows(m, n, k, processors))
    if not warpgroups or odd:
        return _cut(k, *_without_warpgroups(m, n, k, size, processors, epilogue != "none", odd))
    if epilogue == "gelu" and size == 4:
        epilogue = "gelu fp32"
    elif epilogue in ("gelu", "reads") and (size > 2 or out != torch.bfloat16):
        epilogue = "exact"
    bytes_ = 2 * size if epilogue == "thrice" else size
    choices = _choices(m, n, k, bytes_, processors, epilogue)
    _, _, tile, slices = min(choices, key=lambda choice: choice[:2])
    return _cut(k, tile.config(size), slices)


def _cut(k: int, config: dict[str, int], slices: int) -> Plan:
    block = config["BLOCK_K"]
    depth = cdiv(cdiv(max(k, 1), slices), block) * block
    return Plan(config, max(1, cdiv(k, depth)), depth)


def _choices(
    m: int, n: int, k: int, size: int, processors: int, epilogue: str
) -> Iterator[tuple[float, bool, Tile, int]]:
    """(clocks, whether the tile lies across C, tile, slices) of all that may be worth a thought."""
    memory = size * k * (m + n) / MEMORY_BYTES
    for tile in TILES[epilogue]:
        if size > 2 and next_power_of_2(tile.columns) != tile.columns:
            continue  # with B along N ptxas would wait for each product of tf32
        across = (tile.rows < tile.columns) != (m >= n)
        tiles = cdiv(m, tile.rows) * cdiv(n, tile.columns)
        for slices in range(1, 1 + max(1, min(2 * processors // tiles, k // SPLIT_K))):
            kind = epilogue if slices == 1 else "none"
            each = _clocks(tile, cdiv(k, slices), size, kind)
            clocks = max(cdiv(tiles * slices, processors) * each, memory)
            if slices > 1:
                clocks += SUM_CLOCKS + 8 * slices * m * n / MEMORY_BYTES
            yield clocks, across, tile, slices


def _clocks(tile: Tile, k: int, size: int, epilogue: str) -> float:
    """What a tile costs an SM, as above."""
    area = tile.rows * tile.columns
    products = k * max(area / RATE[size], (tile.rows + tile.columns) * size / L2_BYTES)
    end = EPILOGUE[epilogue] * area / 1024
    return products + end if tile.warps > 4 else max(products, (products + end) / 2) + TURN


def _without_warpgroups(
    m: int, n: int, k: int, size: int, processors: int, long: bool, odd: bool
) -> tuple[dict[str, int], int]:
    """(launch configuration, slices of K). A long epilogue wants a second CTA on the SM, which
    multiplies meanwhile."""
    wide = size == 4
    config = {"GROUP_M": GROUP_M, "BLOCK_K": 32 if wide or odd else 64, "num_stages": 3}
    blocks = [(64, 64)] if wide else [(128, 128), (128, 64), (64, 64)]
    for block in blocks[1:] if long and not wide else blocks:
        tiles = cdiv(m, block[0]) * cdiv(n, block[1])
        slices = 1 if tiles > processors else max(1, min(2 * processors // tiles, k // SPLIT_K))
        if tiles * slices > 2 * processors // 3:
            break
    config |= {"BLOCK_M": block[0], "BLOCK_N": block[1]}
    config["num_warps"] = 8 if wide or block[0] == 128 else 4
    if long and block == (128, 64):
        config["maxnreg"] = 128
    return config, slices


def _few_rows(m: int, n: int, k: int, processors: int) -> tuple[dict[str, int], int]:
    """(launch configuration, slices of K) where reading B is all that counts: deep tiles in four
    stages, twice as deep where each has an SM to itself; no slices of K if tiles of 32 columns are
    enough for most SMs."""
    enough = 2 * processors // 3
    width = 64 if cdiv(n, 64) > enough else 32
    tiles = cdiv(n, width)
    slices = 1 if tiles > enough else min(cdiv(processors, tiles), k // SPLIT_K)
    deep = m <= 16 and tiles <= processors
    depth = min(256 if deep else 128, max(64, next_power_of_2(k)))
    height = max(16, next_power_of_2(m))
    blocks = {"BLOCK_M": height, "BLOCK_N": width, "BLOCK_K": depth, "GROUP_M": GROUP_M}
    return blocks | {"num_warps": 4, "num_stages": 4}, max(1, slices)
