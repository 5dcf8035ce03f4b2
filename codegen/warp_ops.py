"""Exchange of values between the lanes of a warp: shuffles of any element width."""

from __future__ import annotations

from collections.abc import Sequence

from minitriton.codegen.emit import attribute, width_of
from minitriton.codegen.lower import Lowering
from minitriton.codegen.shared_address import from_storage, storage_type, to_storage
from minitriton.ir.mlir import ir

FULL_WARP = -1
LAST_LANE = 31


def shuffle_word(
    lowering: Lowering, kind: str, word: ir.Value, lane: ir.Value | int, segment: int = 0
) -> ir.Value:
    """shfl.sync of an i32 by the whole warp; kind "bfly" (lane is a mask) or "idx"; segment: a mask
    of bits that the source lane shares with the receiving one, whatever `lane` has there."""
    if not isinstance(lane, ir.Value):
        lane = lowering.int32(lane)
    operands = (lowering.int32(FULL_WARP), word, lane, lowering.int32(segment << 8 | LAST_LANE))
    attributes = {"kind": attribute(f"#nvvm<shfl_kind {kind}>")}
    return lowering.op("nvvm.shfl.sync", lowering.i32, operands, attributes)


def to_words(lowering: Lowering, values: Sequence[ir.Value]) -> list[ir.Value]:
    """Registers of one type as i32 words: 64-bit ones take two, narrow ones share one.

    `values` is one register, or as many narrow ones (a power of two) as fit into a word.
    """
    stored = [to_storage(lowering, value) for value in values]
    bits = width_of(stored[0].type) * len(stored)
    if bits > 32:
        return lowering.split_bits(stored[0], lowering.i32, bits // 32)
    word = lowering.join_bits(stored, ir.IntegerType.get_signless(bits))
    return [word if bits == 32 else lowering.op("arith.extui", lowering.i32, (word,))]


def from_words(
    lowering: Lowering, words: Sequence[ir.Value], element: ir.Type, count: int
) -> list[ir.Value]:
    """The inverse of `to_words`: `count` registers of carried type `element`."""
    stored = storage_type(lowering, element)
    bits = width_of(stored) * count
    if bits > 32:
        return [from_storage(lowering, lowering.join_bits(words, stored), element)]
    word = words[0]
    if bits < 32:
        word = lowering.op("arith.trunci", ir.IntegerType.get_signless(bits), (word,))
    return [
        from_storage(lowering, value, element) for value in lowering.split_bits(word, stored, count)
    ]


def shuffle(
    lowering: Lowering, kind: str, values: Sequence[ir.Value], lane: ir.Value | int,
    segment: int = 0,
) -> list[ir.Value]:  # fmt: skip
    """shfl.sync of registers that `to_words` accepts."""
    words = [shuffle_word(lowering, kind, w, lane, segment) for w in to_words(lowering, values)]
    return from_words(lowering, words, values[0].type, len(values))


def lane_bit(lowering: Lowering, bit: int) -> ir.Value:
    """i1: bit `bit` of the lane is set."""
    return lowering.once(
        ("lane bit", bit),
        lambda: lowering.compare("ne", lowering.and_(lowering.lane_id, 1 << bit), 0),
    )


def warp_bit(lowering: Lowering, bit: int) -> ir.Value:
    """i1: bit `bit` of the warp is set."""
    return lowering.once(
        ("warp bit", bit),
        lambda: lowering.compare("ne", lowering.and_(lowering.warp_id, 1 << bit), 0),
    )
