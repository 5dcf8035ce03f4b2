"""A of an 8-bit product out of shared memory along M: ldmatrix.trans and byte permutes."""

from __future__ import annotations

from minitriton.codegen.lower import Lowering
from minitriton.codegen.matrix_moves import load_blocks
from minitriton.codegen.shared_address import ThreadAddress
from minitriton.ir.byte_transpose import BLOCKS, ByteTransposePlan
from minitriton.ir.mlir import ir

# prmt: bytes 0 and 2 of both words, and of both the other way round; bytes 1 and 3 are next
EVEN, EVEN_EXCHANGED, NEXT = 0x6420, 0x2064, 0x1111


def load_bytes(
    lowering: Lowering, plan: ByteTransposePlan, pointer: ir.Value, count: int
) -> list[ir.Value]:
    """The `count` i8 registers of the fragments, from the tile at `pointer`."""
    address = ThreadAddress(lowering, pointer, plan.lane_bases, plan.warp_bases, 1)
    even = lowering.once("even bytes", lambda: _selector(lowering))
    odd = lowering.once("odd bytes", lambda: lowering.add(even, NEXT))
    result: list[ir.Value] = []
    for blocks in sorted(plan.instructions, key=lambda blocks: blocks.first):
        words = load_blocks(lowering, address.at(blocks.offset), BLOCKS, transposed=True)
        for pair in (words[:2], words[2:]):
            for selector in (even, odd):
                word = lowering.intrinsic("llvm.nvvm.prmt", lowering.i32, [*pair, selector])
                result += lowering.split_bits(word, lowering.i8, 4)
    assert len(result) == count, "a plan covers the fragments"
    return result


def _selector(lowering: Lowering) -> ir.Value:
    exchanged = lowering.compare("ne", lowering.and_(lowering.lane_id, 2), 0)
    return lowering.select(exchanged, lowering.int32(EVEN_EXCHANGED), lowering.int32(EVEN))
