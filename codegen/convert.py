"""mt.convert_layout: carries out the plan of `ir/conversion.py`."""

from __future__ import annotations

from collections.abc import Sequence

from minitriton.codegen.emit import width_of
from minitriton.codegen.lower import Lowering
from minitriton.codegen.matrix_moves import (
    load_matrices,
    load_matrices_plan,
    store_matrices,
    store_matrices_plan,
)
from minitriton.codegen.shape import Renamed
from minitriton.codegen.shared_address import load_plan, meet, store_plan
from minitriton.codegen.tile import Tile
from minitriton.codegen.warp_ops import lane_bit, shuffle, warp_bit
from minitriton.ir.conversion import (
    BlockShuffles,
    NoMove,
    RegisterMove,
    SharedRoundTrip,
    plan_conversion,
    storage_bits,
)
from minitriton.ir.encoding import layout_of
from minitriton.ir.linear_layout import LinearLayout
from minitriton.ir.mlir import ir
from minitriton.ir.ragged import core
from minitriton.ir.warp_shuffle import Rotation, Round, WarpShuffle


def lower_convert_layout(lowering: Lowering, op: ir.Operation) -> None:
    tile = lowering.tile(op.operands[0])
    result = op.results[0]
    target = layout_of(result.type)
    plan = plan_conversion(tile.layout, target, width_of(tile.element))
    if isinstance(plan, NoMove):
        registers: Sequence[ir.Value] = tile.registers
    elif isinstance(plan, RegisterMove):
        registers = Renamed([tile.registers], [(0, source) for source in plan.source_of])
    elif isinstance(plan, WarpShuffle):
        registers = shuffle_registers(lowering, plan, list(tile.registers))
    elif isinstance(plan, BlockShuffles):
        registers = _shuffle_blocks(lowering, plan, tile, target)
    else:
        registers = round_trip(lowering, plan, tile, target, lowering.scratch(op))
    lowering.set_registers(result, registers)


def _shuffle_blocks(
    lowering: Lowering, plan: BlockShuffles, tile: Tile, target: LinearLayout
) -> list[ir.Value]:
    """The registers of the result that hold elements."""
    made: dict[int, ir.Value] = {}
    for block in plan.blocks:
        sent = [tile.registers[register] for register in block.src_registers]
        received = shuffle_registers(lowering, plan.shuffle, sent)
        made.update(zip(block.dst_registers, received, strict=True))
    return [made[register] for register in target.registers]


def shuffle_registers(
    lowering: Lowering, plan: WarpShuffle, registers: list[ir.Value]
) -> list[ir.Value]:
    """Registers of the result; what the steps mean is said in ir/warp_shuffle.py."""
    registers = _rotate(lowering, plan.before, registers)
    received: list[ir.Value | None] = [None] * plan.num_registers
    for fetch in plan.rounds:
        values = [registers[source] for source in fetch.sources]
        if not plan.is_local(fetch):
            values = _fetch(lowering, plan, fetch, values)
        for register, value in zip(fetch.targets, values, strict=True):
            received[register] = value
    first = next(value for value in received if value is not None)
    # repeated registers are filled in last; until then any value will do
    whole = [first if value is None else value for value in received]
    result = _rotate(lowering, plan.after, whole)
    for register, original in plan.duplicates:
        result[register] = result[original]
    return result


def _fetch(
    lowering: Lowering, plan: WarpShuffle, fetch: Round, values: list[ir.Value]
) -> list[ir.Value]:
    """What a round brings from other lanes, without a register for their number if possible."""
    constant = fetch.lane_constant
    if plan.is_butterfly:
        return shuffle(lowering, "bfly", values, constant)
    if (segment := plan.segment_mask(fetch)) is not None:
        return shuffle(lowering, "idx", values, constant, segment)
    terms = ((lowering.lane_id, plan.lane_bases), (lowering.warp_id, plan.warp_bases))
    key = ("sender", plan.lane_bases, plan.warp_bases)
    sender = lowering.once(key, lambda: lowering.linear(terms))
    return shuffle(lowering, "idx", values, lowering.xor(sender, constant) if constant else sender)


def _rotate(
    lowering: Lowering, rotations: Sequence[Rotation], registers: list[ir.Value]
) -> list[ir.Value]:
    for rotation in rotations:
        bit = lane_bit if rotation.name == "lane" else warp_bit
        chosen = bit(lowering, rotation.bit)
        registers = [
            lowering.select(chosen, registers[i ^ rotation.mask], registers[i])
            for i in range(len(registers))
        ]
    return registers


def round_trip(
    lowering: Lowering,
    plan: SharedRoundTrip,
    tile: Tile,
    target: LinearLayout,
    scratch: ir.Value,
) -> list[ir.Value]:
    """The registers of the result that hold elements, through the scratch buffer some chunks at a
    time."""
    result: list[ir.Value | None] = [None] * target.num_registers
    bits = storage_bits(width_of(tile.element))
    stores = loads = None
    whole, received = core(tile.layout), core(target)
    if len(plan.chunks[0].src_registers) == whole.num_registers:  # which matrix plans number
        shared = plan.shared.reshape(whole.shape)
        stores = store_matrices_plan(lowering, shared, whole, bits, plan.store.vec)
        loads = load_matrices_plan(lowering, shared, received, bits, plan.load.vec)
    step = plan.bytes // plan.together
    for start in range(0, len(plan.chunks), plan.together):
        if start:
            meet(lowering, warp_local=plan.warp_local)
        chunks = plan.chunks[start : start + plan.together]
        places = [lowering.offset_pointer(scratch, step * index) for index in range(len(chunks))]
        for chunk, place in zip(chunks, places, strict=True):
            sent = [tile.registers[register] for register in chunk.src_registers]
            if stores is not None:
                store_matrices(lowering, stores, place, sent)
            else:
                store_plan(lowering, plan.store, place, sent)
        meet(lowering, warp_local=plan.warp_local)
        for chunk, place in zip(chunks, places, strict=True):
            count = len(chunk.dst_registers)
            if loads is not None:
                values = load_matrices(lowering, loads, place, tile.element, count)
            else:
                values = load_plan(lowering, plan.load, place, tile.element, count)
            for register, value in zip(chunk.dst_registers, values, strict=True):
                result[register] = value
    return [value for value in result if value is not None]


RULES = {"mt.convert_layout": lower_convert_layout}
