"""Plan layout conversions that stay within each warp as shuffles and selects.

The conversion is a linear map: result register r of lane l needs source register
A r + B l + C w of lane D r + E l + F w. Round t delivers to lane l its register t + G l, with G
chosen so that the lanes of a round read different lanes or the same register. Then the value a
lane sends depends linearly on that lane, and three steps suffice:

1. rotate: for each (input bit, mask) of `before`, lanes or warps with that bit set exchange
   register i with register i ^ mask;
2. rounds: lane l fetches a register from lane (lane_bases, warp_bases at l, w) ^ lane_constant;
3. rotate by `after`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minitriton.ir import f2
from minitriton.ir.linear_layout import LinearLayout
from minitriton.ir.vector_groups import duplicate_registers

if TYPE_CHECKING:
    import numpy as np

MAX_ROTATIONS = 3


@dataclass(frozen=True)
class Rotation:
    """Where bit `bit` of input `name` (lane or warp) is set, register i becomes i ^ mask."""

    name: str
    bit: int
    mask: int


@dataclass(frozen=True)
class Round:
    """One fetch. sources: registers the sender packs into 32 bits (one for 32-bit elements, a
    pair of 32-bit shuffles for 64); targets: where the receiver puts them, in the same order."""

    lane_constant: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True)
class WarpShuffle:
    """Source lane of a round: XOR of lane_bases over the lane's set bits, of warp_bases over
    the warp's, and the round's constant. duplicates: (result register, register to copy)."""

    before: tuple[Rotation, ...]
    rounds: tuple[Round, ...]
    after: tuple[Rotation, ...]
    lane_bases: tuple[int, ...]
    warp_bases: tuple[int, ...]
    num_registers: int
    duplicates: tuple[tuple[int, int], ...]

    def is_local(self, fetch: Round) -> bool:
        """The round reads the lane itself: a register move."""
        return self.is_butterfly and fetch.lane_constant == 0

    @property
    def is_butterfly(self) -> bool:
        """Every round reads lane ^ lane_constant: shfl.bfly."""
        identity = all(basis == 1 << bit for bit, basis in enumerate(self.lane_bases))
        return identity and not any(self.warp_bases)

    def segment_mask(self, fetch: Round) -> int | None:
        """The bits of the lane that the source lane shares with it, if the others are those of the
        round's constant: shfl.idx takes them from its segment mask. None where that is not so."""
        own = sum(basis for bit, basis in enumerate(self.lane_bases) if basis == 1 << bit)
        others = any(basis & ~own for basis in self.lane_bases)
        if others or sum(self.lane_bases) != own or any(self.warp_bases):
            return None
        return None if fetch.lane_constant & own else own


def plan_shuffle(where: LinearLayout, dst: LinearLayout, bits: int) -> WarpShuffle | None:
    """Shuffles for `where` = src.invert_and_compose(dst), which must keep data in its warp.

    bits: 8 to 64 per element. None where shared memory is likely cheaper: more than 2 shuffles
    per 32-bit result register, or more than MAX_ROTATIONS passes of selects.
    """
    moves = dict(where.bases)
    duplicates = duplicate_registers(dst.flat("register"))
    free = dst.free_bits("register")
    kept = [bit for bit in range(dst.in_bits("register")) if not free >> bit & 1]
    fetched = [moves["register"][bit] for bit in kept]
    turned = _turn(moves["lane"], fetched)
    if turned is None:
        return None
    senders = turned.register_of_sender()
    before = [
        Rotation("lane", bit, senders(1 << bit)) for bit in range(where.shape[1].bit_length() - 1)
    ]
    before += [
        Rotation("warp", bit, register ^ senders(lane))
        for bit, (register, lane, _) in enumerate(moves["warp"])
    ]
    after = [
        Rotation("lane", bit, f2.combine([1 << b for b in kept], turn))
        for bit, turn in enumerate(turned.turns)
    ]
    rotations = [tuple(r for r in group if r.mask) for group in (before, after)]
    steps = [
        (1 << bit, reg ^ senders(lane), lane)
        for bit, (reg, lane, _) in zip(kept, fetched, strict=True)
    ]
    plan = WarpShuffle(
        rotations[0],
        _rounds(steps, bits),
        rotations[1],
        tuple(turned.lanes),
        tuple(lane for _, lane, _ in moves["warp"]),
        dst.num_registers,
        duplicates,
    )
    shuffles = sum(not plan.is_local(fetch) for fetch in plan.rounds) * max(1, bits // 32)
    results = max(1, (bits << len(kept)) // 32)
    passes = len(rotations[0]) + len(rotations[1])
    return plan if shuffles <= 2 * results and passes <= MAX_ROTATIONS else None


def _rounds(steps: Sequence[tuple[int, int, int]], bits: int) -> tuple[Round, ...]:
    """steps: per register bit (target mask, source mask, lane mask). Bits that stay in the lane
    are packed into one 32-bit value as far as it has room."""
    room = max(0, (32 // bits).bit_length() - 1)
    packed = [step for step in steps if step[2] == 0][:room]
    outer = [step for step in steps if step not in packed]
    targets, sources, lanes = (f2.span_elements([step[i] for step in outer]) for i in range(3))
    inner_targets, inner_sources = (f2.span_elements([s[i] for s in packed]) for i in range(2))
    return tuple(
        Round(lane, tuple(source ^ i for i in inner_sources), tuple(t ^ i for i in inner_targets))
        for t, source, lane in zip(targets, sources, lanes, strict=True)
    )


@dataclass
class _Turn:
    """Per lane bit: turns (columns of G), lanes (D G + E) and registers (A G + B)."""

    turns: list[int]
    lanes: list[int]
    registers: list[int]

    def register_of_sender(self) -> Callable[[int], int]:
        """The linear map from a lane that some receiver reads to the register it turns by."""
        vectors = [*self.lanes, *(1 << bit for bit in range(32))]
        registers = [*self.registers, *([0] * 32)]
        span = f2.Span(vectors)

        def register(lane: int) -> int:
            mask = span.solve(lane)
            assert mask is not None
            return f2.combine(registers, mask)

        return register


def _turn(lanes: Sequence[tuple[int, ...]], fetched: Sequence[tuple[int, ...]]) -> _Turn | None:
    """Choose G: each lane bit reads another lane, or repeats what an earlier combination reads."""
    count = len(lanes)
    turn = _Turn([0] * count, [v[1] for v in lanes], [v[0] for v in lanes])
    span = f2.Span()
    accepted: list[int] = []
    waiting = []
    for bit in range(count):
        if turn.lanes[bit] in span:
            waiting.append(bit)
        else:
            span.add(turn.lanes[bit])
            accepted.append(turn.registers[bit])
    for bit in waiting:
        mask = span.solve(turn.lanes[bit])
        if mask is not None and f2.combine(accepted, mask) == turn.registers[bit]:
            continue
        for position, (register, lane, _) in enumerate(fetched):
            if (turn.lanes[bit] ^ lane) not in span:
                turn.turns[bit] = 1 << position
                turn.lanes[bit] ^= lane
                turn.registers[bit] ^= register
                span.add(turn.lanes[bit])
                accepted.append(turn.registers[bit])
                break
        else:
            return None
    return turn


def simulate_shuffle(plan: WarpShuffle, values: np.ndarray) -> np.ndarray:
    """Execute the plan on [registers, lanes, warps]."""
    import numpy as np

    def rotate(data: np.ndarray, rotations: tuple[Rotation, ...]) -> np.ndarray:
        lane, warp = np.ogrid[: data.shape[1], : data.shape[2]]
        for rotation in rotations:
            chosen = ((lane if rotation.name == "lane" else warp) >> rotation.bit & 1) == 1
            other = data[np.arange(len(data)) ^ rotation.mask]
            data = np.where(chosen, other, data)
        return data

    sent = rotate(values, plan.before)
    warps = np.arange(values.shape[2])
    base = np.array(f2.span_elements(plan.lane_bases))[:, None]
    base = base ^ np.array(f2.span_elements(plan.warp_bases))
    got = np.zeros((plan.num_registers, *base.shape), values.dtype)
    for fetch in plan.rounds:
        for source, target in zip(fetch.sources, fetch.targets, strict=True):
            got[target] = sent[source][base ^ fetch.lane_constant, warps]
    result = rotate(got, plan.after)
    for register, original in plan.duplicates:
        result[register] = result[original]
    return result
