"""The combine region of reduce and scan on scalars, and their exchange between warps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

from minitriton.codegen.lower import Lowering
from minitriton.codegen.shared_address import (
    MAX_ACCESS_BYTES,
    ThreadAddress,
    from_storage,
    load_vector,
    meet,
    storage_bytes,
    storage_type,
    to_storage,
    writers,
)
from minitriton.codegen.warp_ops import shuffle
from minitriton.ir.axis import CrossWarp
from minitriton.ir.linear_layout import log2_exact
from minitriton.ir.mlir import ir

Operands = list[ir.Value]  # one scalar per operand of the op: what the region combines
Combine = Callable[[Operands, Operands], Operands]
CHAINS = 4  # results in flight while a thread combines its own values: hides the latency of one


def combine_of(lowering: Lowering, op: ir.Operation) -> Combine:
    """Emits a copy of the op's region for (earlier operands, later operands)."""
    block = op.regions[0].blocks[0]

    def combine(earlier: Operands, later: Operands) -> Operands:
        results = lowering.inline(block, [*earlier, *later])
        return [value for value in results if isinstance(value, ir.Value)]

    return combine


def fold(values: Sequence[Operands], combine: Combine) -> Operands:
    """Combines neighbours pairwise until one is left: short chains, always the same order."""
    level = list(values)
    while len(level) > 1:
        paired = [combine(a, b) for a, b in zip(level[::2], level[1::2], strict=False)]
        level = paired + level[len(level) // 2 * 2 :]
    return level[0]


def fold_registers(values: Sequence[Operands], combine: Combine) -> Operands:
    """Combines a thread's own values in a few chains: products that are summed become fma."""
    chains = [
        functools.reduce(combine, values[start::CHAINS])
        for start in range(min(CHAINS, len(values)))
    ]
    return fold(chains, combine)


def shuffle_operands(lowering: Lowering, operands: Operands, mask: int) -> Operands:
    """The operands of lane ^ mask."""
    return [shuffle(lowering, "bfly", [value], mask)[0] for value in operands]


def exchange(
    lowering: Lowering,
    plan: CrossWarp,
    scratch: ir.Value,
    partials: Sequence[Operands],
    readers: int = 1,
) -> Iterator[list[Operands]]:
    """Per line (register of the result) the operands of every warp along the axis, in order; of
    those, the part that is this lane's among `readers` lanes in a row. A line is read when it is
    asked for."""
    own_warp = [a ^ b for a, b in zip(plan.warp_bases, plan.position_bases, strict=True)]
    elements = [value.type for value in partials[0]]
    sizes = [storage_bytes(element) for element in elements]
    regions = [lowering.offset_pointer(scratch, start) for start in plan.operand_bytes]
    stores = []
    for index, (region, size) in enumerate(zip(regions, sizes, strict=True)):
        address = ThreadAddress(lowering, region, plan.lane_bases, own_warp, size)
        for partial, offset in zip(partials, plan.register_offsets, strict=True):
            value = to_storage(lowering, partial[index])
            stores.append((value, address.at(offset), size))
    with writers(lowering, plan.idle_lanes, plan.idle_warps):
        for value, place, size in stores:
            lowering.store(value, place, size)
    meet(lowering)
    count = plan.count // readers
    parts = [count << bit for bit in range(log2_exact(readers))]
    lane_bases = (*parts, *plan.lane_bases[len(parts) :])  # all of these are 0 where lanes share
    addresses = [
        ThreadAddress(lowering, region, lane_bases, plan.warp_bases, size)
        for region, size in zip(regions, sizes, strict=True)
    ]
    for offset in plan.register_offsets:
        columns = [
            _read_line(lowering, address, offset, count, element)
            for address, element in zip(addresses, elements, strict=True)
        ]
        yield [list(operands) for operands in zip(*columns, strict=True)]


def _read_line(
    lowering: Lowering, address: ThreadAddress, offset: int, count: int, element: ir.Type
) -> list[ir.Value]:
    """`count` consecutive partials, in accesses as wide as they go."""
    size = storage_bytes(element)
    stored = storage_type(lowering, element)
    width = min(count, MAX_ACCESS_BYTES // size)
    values: list[ir.Value] = []
    for start in range(0, count, width):
        place = address.at(offset ^ start)
        values += load_vector(lowering, stored, width, place, width * size)
    return [from_storage(lowering, value, element) for value in values]
