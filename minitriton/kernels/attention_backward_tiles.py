"""Sizes of the tiles in which attention's backward kernels work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from minitriton.kernels.attention_tiles import Plan


class Tile(NamedTuple):
    """Of one kernel: rows of q and of k in a step, and how it is launched."""

    queries: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiles:
    """keys: of the kernel that makes dk and dv; of dk alone where `values` is that of a launch for
    dv. queries: of the kernel that makes dq."""

    keys: Tile
    queries: Tile
    values: Tile | None = None


SHARE_OF_L2 = 24 << 20  # bytes, of the 50 MB of a Hopper GPU, for what programs stream
# Products on wgmma, by the channels of the widest tile. A warpgroup has 64 rows of each gradient;
# where it has 256 channels, those of one fill its registers.
WARPGROUPS = {
    64: Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),
    128: Tiles(Tile(64, 64, 4, 2), Tile(128, 64, 8, 3)),
    192: Tiles(Tile(32, 128, 8, 3), Tile(128, 64, 8, 3)),
    256: Tiles(Tile(64, 128, 8, 2), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2)),
}
# The same for programs that keep more besides: the words of dropout, ends of packed sequences.
WARPGROUPS_MORE = {
    64: Tiles(Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    128: Tiles(Tile(32, 128, 8, 2), Tile(128, 64, 8, 2)),
    256: Tiles(Tile(32, 128, 8, 2), Tile(128, 32, 8, 2), Tile(32, 128, 8, 2)),
}


def heads_together(heads: int, streamed: int) -> int:
    """How many of the heads start their longest programs before the shorter ones of any: as many as
    divide the heads and stay in L2 side by side. streamed: bytes that programs of one head read."""
    most = max(1, SHARE_OF_L2 // streamed)
    return max(n for n in range(1, min(most, heads) + 1) if heads % n == 0)


def choose(plan: Plan, element_size: int) -> Tiles:
    """Measured, so that nothing spills and all fits in the 99 KB of the smallest GPU, with
    WARPGROUPS in 227 KB."""
    widest = max(plan.TILE + plan.REST, plan.V_TILE)
    if plan.WARPGROUPS and (tiles := _on_warpgroups(plan, widest)):
        return tiles
    if element_size == 4:
        if widest <= 64:
            return Tiles(Tile(32, 16 if plan.QK % 64 else 32, 8, 2), Tile(32, 32, 8, 2))
        return Tiles(*[Tile(16, 32 if widest <= 128 else 16, 8, 2)] * 2)
    if widest <= 64:
        return Tiles(Tile(64, 64, 8, 2), Tile(64, 64, 8, 2))
    if widest <= 128:
        return Tiles(Tile(32, 64, 8, 2), Tile(64, 32, 8, 2))
    if plan.TILE <= 128 and plan.V_TILE <= 128:
        rows = 32 if plan.SHARED and not plan.PACKED else 16
        return Tiles(Tile(rows, 64, 8, 2), Tile(64, 32, 8, 2))
    return Tiles(Tile(16, 32, 8, 2), Tile(32, 16, 8, 2))


def _on_warpgroups(plan: Plan, widest: int) -> Tiles | None:
    """None where registers are too few."""
    more = plan.DROPOUT or (plan.PACKED and widest > 64)
    table = WARPGROUPS_MORE if more else WARPGROUPS
    return next((tiles for width, tiles in table.items() if widest <= width), None)
