"""Stores of accumulators by TMA: threads put the tile into shared memory, one asks for its boxes.

    before: %y = convert_layout %x; store %p, %y, %mask
    after:  buffer [slots]; for each piece of %x: tma_store_wait; barrier; local_store piece, slot;
            proxy_fence; barrier; tma_store slot, coordinates

A tile that does not fit `mt.epilogue_bytes` (EPILOGUE_BYTES), nor memory that nobody else needs,
goes in pieces, in turn through two slots; a piece is some of each thread's registers. The
first wait and barrier are left out where the slot cannot be in use. The wait for the last piece
comes after the outermost loop, or after the last such store of the block.
Requires: layouts; loops are pipelined. Ensures: the same stores. Left alone are small tiles, those
whose layout suits global memory, and, with a remark, those that no tensor map (`tensor_maps`)
describes, whose memory others may access (`global_order`), or for which there is no room.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import prod

from minitriton.ir.axis_analysis import AxisFacts, analyse
from minitriton.ir.builder import Builder, i32_attr
from minitriton.ir.conversion import NoMove, RegisterMove, plan_conversion
from minitriton.ir.dialect import element_of
from minitriton.ir.encoding import layout_of, mem_type, tile_type
from minitriton.ir.layouts import bank_conflicts, ldmatrix_plan, shared_access_plan, shared_tma
from minitriton.ir.linear_layout import LinearLayout, granule, hull
from minitriton.ir.matrix_descriptor import ALIGNMENT, operand_span
from minitriton.ir.mlir import ir
from minitriton.ir.register_maps import narrowed
from minitriton.ir.target import Target
from minitriton.ir.tensor_map_specs import add_spec
from minitriton.ir.types import bit_width
from minitriton.ir.warp_roles import ENDS
from minitriton.passes.access_layouts import MAX_VECTOR_BYTES, SECTOR_BYTES
from minitriton.passes.affine import ONE, AffineAnalysis
from minitriton.passes.allocate_shared import bytes_with
from minitriton.passes.global_order import GlobalOrder, outermost_loop
from minitriton.passes.map_terms import describe, evaluate
from minitriton.passes.op_classes import MEMORY_ACCESS, is_tile
from minitriton.passes.remarks import add_remark
from minitriton.passes.simplify import upstream
from minitriton.passes.slots import allocate_slots
from minitriton.passes.tensor_maps import MapPlan, NotAffine
from minitriton.passes.tensor_maps import plan as plan_map
from minitriton.passes.tile_pass import PassOptions
from minitriton.passes.traversal import Value, defining_op, int_attribute, kernel_of, ops_of, walk

EPILOGUE_BYTES = 32 * 1024  # of shared memory for the tiles on their way out of a kernel
ROOM = "mt.epilogue_bytes"  # attribute of the module that replaces EPILOGUE_BYTES
MIN_TILE_BYTES = 4096  # below that threads have so few stores that to wait for TMA costs more
MAX_ROWS = 8  # of a thread that are stored from fragments of a transpose
_ACCESSES = MEMORY_ACCESS | {"mt.tma_store"}
MIN_ROW_BYTES = 64  # of a piece, unless the tile's rows are shorter: two sectors of memory


@dataclass(frozen=True)
class Pieces:
    """How a tile goes through shared memory: `count` pieces of `size` elements along `axis`, each
    in a slot of layout `slot`; slots: 1 or 2, which several tiles may go through."""

    axis: int
    size: int
    count: int
    slots: int
    slot: LinearLayout
    bytes: int  # of all slots


@dataclass(frozen=True)
class _Store:
    """A store that TMA can make; tile: what is stored, as threads hold it before; order: the dims,
    fastest first; loop: the outermost around it."""

    store: ir.Operation
    tile: Value
    order: tuple[int, ...]
    map: MapPlan
    loop: ir.Operation | None

    @property
    def sharing(self) -> Hashable:
        """Equal for stores of one iteration that go through the same slots, one after the other:
        of equal tiles into one array."""
        if self.loop is None:
            return self.store
        tile = self.tile.type
        return (
            self.loop,
            self.store.block,
            self.map.base,
            layout_of(tile),
            tile.element_type,
            self.order,
        )


@dataclass(frozen=True)
class _Copy(_Store):
    """One that TMA makes; before: how many pieces of other stores go through its slots first."""

    pieces: Pieces
    before: int


def run(module: ir.Module, target: Target, options: PassOptions) -> None:
    """Rewrites all stores of the kernel that qualify."""
    if not options.tma or not target.has("tma"):
        return
    analysis = AffineAnalysis(kernel_of(module).regions[0].blocks[0])
    order = GlobalOrder(module)
    stores = _described(module, analysis)
    while True:
        stores = _apart(module, stores, order)
        copies = _fitted(module, stores, target)
        if len(copies) == len(stores):
            break
        stores = [s for s in stores if any(s.store == copy.store for copy in copies)]
    copied = [copy.store for copy in copies]
    repeated = [_is_repeated(copies, number, order) for number in range(len(copies))]
    ends = [copy.loop or _last(copy.store, copied) for copy in copies]
    buffers: dict[Hashable, Value] = {}
    buffers_of: dict[ir.Operation, list[Value]] = {}
    for copy, again, end in zip(copies, repeated, ends, strict=True):
        count = copy.pieces.count
        text = f"store by TMA in {count} piece{'s' * (count > 1)}: {copy.pieces.bytes} bytes"
        add_remark(module, copy.store, text)
        if copy.sharing not in buffers:
            buffers[copy.sharing] = made = _allocate(copy)
            buffers_of.setdefault(end, []).append(made)
        _rewrite(module, copy, buffers[copy.sharing], analysis, repeated=again)
    for end, made in buffers_of.items():
        _finish(end, made)
    for store in copied:
        store.erase()
    if copies:
        _keep_turns(module)
        upstream(module, options)


def _keep_turns(module: ir.Module) -> None:
    """Before another group of warps may store, all that this one has stored is there. Its own turn
    it needs only when the first copy goes out, if nothing else touches global memory before; the
    group meets there, as at the barrier that would come before the copy."""
    for op in walk(kernel_of(module)):
        if _ends_turn(op):
            builder = Builder(ir.InsertionPoint(op), op.location)
            builder.create("mt.tma_store_wait", [], [], {"pending": i32_attr(0)})
        elif op.name == "mt.turn_wait" and ENDS in op.attributes:
            ops = ops_of(op.block)
            for place in range(ops.index(op), len(ops)):
                if ops[place].name == "mt.tma_store":
                    op.move_before(ops[place])
                    ops[place - 1].erase()
                if any(inner.name in _ACCESSES for inner in (ops[place], *walk(ops[place]))):
                    break


def _ends_turn(op: ir.Operation) -> bool:
    """Whether the end of a tile's iteration is over after `op` (`ping_pong.deal_iterations`)."""
    own = "mt.group" not in op.attributes
    return bool(op.name == "mt.turn_pass" and own and ENDS in op.attributes)


def _is_waited_for(block: ir.Block) -> bool:
    """Whether all stores of a block are there at its end."""
    return any(map(_ends_turn, ops_of(block)))


def _is_repeated(copies: Sequence[_Copy], number: int, order: GlobalOrder) -> bool:
    """Whether a store by TMA, number `number`, must wait for others to the same argument. The first
    one of a block waits for those before the block, so that only what follows it matters."""
    own = copies[number]
    earlier = [c for c in copies[:number] if c.map.base == own.map.base]
    for place, first in enumerate(earlier):
        if first.store.block == own.store.block:
            return not all(_are_apart(other, own) for other in earlier[place:])
    return order.is_repeated(own.store, [copy.store for copy in copies])


def _are_apart(a: _Store, b: _Store) -> bool:
    """Whether two stores are to different boxes of an array, provided that different elements of
    that have different addresses. Where a dimension ends must be known, or it runs into others."""
    if a.store.block != b.store.block or a.map.offset != b.map.offset:
        return False
    if len(a.map.dims) != len(b.map.dims) or any(d.size is None for d in a.map.dims[:-1]):
        return False
    pairs = list(zip(a.map.dims, b.map.dims, strict=True))
    if any((x.stride, x.size, x.tile_dim) != (y.stride, y.size, y.tile_dim) for x, y in pairs):
        return False
    for x, y in pairs:
        distance = (x.coordinate - y.coordinate).value
        extents = [1 if x.tile_dim is None else s.tile.type.shape[x.tile_dim] for s in (a, b)]
        if distance is not None and abs(distance) >= max(extents):
            return True
    return False


def _last(store: ir.Operation, stores: Sequence[ir.Operation]) -> ir.Operation:
    """The last of `stores`, which are in program order, in the block of `store`."""
    return [other for other in stores if other.block == store.block][-1]


def _described(module: ir.Module, analysis: AffineAnalysis) -> list[_Store]:
    """The stores that gain and that a tensor map describes."""
    function = kernel_of(module)
    facts = analyse(function)
    found = []
    for op in [op for op in walk(function) if op.name == "mt.store" and is_tile(op.operands[1])]:
        order = _order(op, analysis)
        tile = _tile(op, order[0], facts)
        if tile is None:
            continue
        if _is_beside_flights(op):
            _leave(module, op, "products are in flight beside it")
            continue
        try:
            plan = _plan(op, order, analysis, facts)
        except NotAffine as reason:
            _leave(module, op, str(reason))
            continue
        found.append(_Store(op, tile, order, plan, outermost_loop(op)))
    return found


def _is_beside_flights(store: ir.Operation) -> bool:
    """Whether products of this iteration are in flight where `store` is: ptxas may then wait for
    each wgmma, and the next iteration would wait until all is stored."""
    flying = 0
    for op in ops_of(store.block):
        if op == store:
            break
        if op.name == "mt.warpgroup_dot":
            flying = flying + 1 if "mt.in_flight" in op.attributes else 0
        elif op.name in ("mt.warpgroup_result", "mt.warpgroup_wait"):
            flying = min(flying, int_attribute(op, "pending"))
    return flying > 0


def _fitted(module: ir.Module, stores: Sequence[_Store], target: Target) -> list[_Copy]:
    """Those for which there is room if all become copies; remarks say why the others have none."""
    function = kernel_of(module)
    room = int_attribute(module.operation, ROOM, EPILOGUE_BYTES)
    alone = "mt.producer_warps" in module.operation.attributes
    loops = {s.sharing: s.loop for s in stores if s.loop is not None}
    counts = Counter(loops.values())
    ops = [s.store for s in stores]
    exchanges = [s.store.operands[1].owner.operation for s in stores if not _is_direct(s)]
    taken: list[tuple[ir.Operation, ir.Operation, int]] = []
    copies: list[_Copy] = []
    for s in stores:
        same = [copy for copy in copies if copy.sharing == s.sharing]
        if same:
            pieces, before = same[-1].pieces, same[-1].before + same[-1].pieces.count
            copies.append(_Copy(s.store, s.tile, s.order, s.map, s.loop, pieces, before))
            continue
        share = room if s.loop is None else room // counts[s.loop]
        life = (s.loop, s.loop) if s.loop else (s.store, _last(s.store, ops))

        def takes(size: int, life: tuple[ir.Operation, ir.Operation] = life) -> int:
            return bytes_with(function, [*taken, (*life, size)], ALIGNMENT, exchanges)

        try:
            several = sum(other.sharing == s.sharing for other in stores) > 1
            pieces = _fitting(s.tile, s.order, share, target, takes, alone=alone, several=several)
        except NotAffine as reason:
            _leave(module, s.store, str(reason))
            continue
        taken.append((*life, pieces.bytes))
        copies.append(_Copy(s.store, s.tile, s.order, s.map, s.loop, pieces, 0))
    return copies


def _is_direct(s: _Store) -> bool:
    """Whether the tile is stored in the layout that it has."""
    return bool(s.tile == s.store.operands[1])


def _fitting(
    tile: Value, order: tuple[int, ...], share: int, target: Target,
    takes: Callable[[int], int], *, alone: bool, several: bool,
) -> Pieces:  # fmt: skip
    """Pieces of at most `share` bytes, smaller ones where memory is short; the whole tile where it
    finds memory that others have done with, or that is free if the CTA is alone on its SM. `takes`:
    what the kernel needs with so many bytes for the pieces. several: one such tile follows another.
    Raises NotAffine."""
    bits = bit_width(element_of(tile.type))
    whole = prod(tile.type.shape) * bits // 8 * (1 + several)
    if takes(whole) <= (target.max_shared_bytes if alone else takes(0)):
        share = max(share, whole)
    while True:
        stmatrix = target.has("stmatrix")
        pieces = pieces_of(
            layout_of(tile.type), order, bits, share, stmatrix=stmatrix, several=several
        )
        if takes(pieces.bytes) <= target.max_shared_bytes:
            return pieces
        share = pieces.bytes // 2


def _tile(store: ir.Operation, inner: int, facts: AxisFacts) -> Value | None:
    """The stored tile as it is before threads exchange elements for the store, or while one access
    of a warp does not fill sectors of memory; None if neither is so, or the tile is small."""
    value = store.operands[1]
    type_, layout = value.type, layout_of(value.type)
    bits = bit_width(element_of(type_))
    size = prod(type_.shape) * bits // 8
    # a row alone would take a box for each 128 bytes
    if bits not in (8, 16, 32) or size < MIN_TILE_BYTES or sum(n > 1 for n in type_.shape) < 2:
        return None
    maker = defining_op(value)
    if maker is not None and maker.name == "mt.convert_layout":
        source = maker.operands[0]
        moves = not isinstance(
            plan_conversion(layout_of(source.type), layout, bits), (NoMove, RegisterMove)
        )
        return source if moves and len(list(value.uses)) == 1 else None
    limit = min(facts.access_limits(store)[inner], MAX_VECTOR_BYTES * 8 // bits)
    run = layout.contiguous_registers(inner, limit).width
    while run << layout.dim_shifts[inner] in layout.flat("lane"):
        run *= 2
    fills = run * bits // 8 >= SECTOR_BYTES
    return value if not fills or _is_scattered(layout, inner) else None


def _is_scattered(layout: LinearLayout, inner: int) -> bool:
    """Whether neighbouring lanes store different rows, and each thread so many that their addresses
    would take the registers: fragments of a transpose."""
    shift = layout.dim_shifts[inner]
    inside = layout.shape[inner] - 1 << shift
    rows = 1 << sum(bool(basis & ~inside) for basis in layout.flat("register"))
    return rows > MAX_ROWS and bool(layout.flat("lane")[0] & ~inside)


def _order(store: ir.Operation, analysis: AffineAnalysis) -> tuple[int, ...]:
    """The dimensions of a store, fastest first."""
    address = analysis.of(store.operands[0])
    dims = list(reversed(range(len(store.operands[0].type.shape))))
    inner = [d for d in dims if address is not None and address.dims[d] == ONE]
    return tuple(dict.fromkeys([*inner[:1], *dims]))


def _plan(
    store: ir.Operation, order: tuple[int, ...], analysis: AffineAnalysis, facts: AxisFacts
) -> MapPlan:
    """Raises NotAffine."""
    if "cache" in store.attributes or "evict" in store.attributes:
        raise NotAffine("it says how to cache what it stores")
    plan = plan_map(
        store, order, bit_width(element_of(store.operands[1].type)) // 8, analysis, facts
    )
    if not all(dim.stride for dim in plan.dims if dim.tile_dim is not None):
        raise NotAffine("a dimension has no stride")
    return plan


def _apart(module: ir.Module, stores: list[_Store], order: GlobalOrder) -> list[_Store]:
    """Without those that something else may have to come before or after."""
    while True:
        copied = [s.store for s in stores]
        reasons = [order.obstacle(store, copied) for store in copied]
        for store, reason in zip(copied, reasons, strict=True):
            if reason is not None:
                _leave(module, store, reason)
        if not any(reasons):
            return stores
        stores = [s for s, reason in zip(stores, reasons, strict=True) if reason is None]


def _leave(module: ir.Module, store: ir.Operation, reason: str) -> None:
    add_remark(module, store, f"store not by TMA: {reason}")


def pieces_of(
    layout: LinearLayout, order: tuple[int, ...], bits: int, room: int, *, stmatrix: bool,
    several: bool = False,
) -> Pieces:  # fmt: skip
    """The largest pieces of a tile in registers that take at most `room` bytes and that threads
    can write without bank conflicts (with two at a time, if they are scattered), in one slot where
    none fit into two. several: tiles follow each other. Raises NotAffine where there are none."""
    worst = 2 if _is_scattered(layout, order[0]) else 1
    reason = "threads cannot write its boxes without bank conflicts"
    for most, axis in itertools.product((2, 1), order):
        extent = layout.shape[axis]
        least = MIN_ROW_BYTES * 8 // bits if axis == order[0] else 1
        for size in _sizes(extent, min(least, extent)):
            slots = 1 if size == extent and not several else most
            part = narrowed(layout, axis, size)
            slot = None if part is None else _slot(part, order, bits, worst, stmatrix=stmatrix)
            if slot is not None:
                each = prod(slot.shape) * bits // 8
                if each * slots <= room and (slots == 1 or each % ALIGNMENT == 0):
                    return Pieces(axis, size, extent // size, slots, slot, each * slots)
                reason = f"its pieces do not fit {room} bytes of shared memory"
    raise NotAffine(reason)


def _sizes(extent: int, least: int) -> list[int]:
    """Of a dimension's pieces: all of it, then powers of two."""
    sizes = [extent, granule(extent) if extent != hull(extent) else extent // 2]
    while sizes[-1] >= least:
        sizes.append(sizes[-1] // 2)
    return sizes[:-1]


def _slot(
    part: LinearLayout, order: tuple[int, ...], bits: int, worst: int, *, stmatrix: bool
) -> LinearLayout | None:
    """The layout in which TMA takes a piece, if at most `worst` accesses of threads that write it
    there from `part` meet in a bank; 1: no conflicts."""
    span = operand_span(part.shape, order, bits // 8)
    if not span:
        return None
    slot = shared_tma(part.shape, order, bits, span)
    matrices = ldmatrix_plan(slot, part, bits) if stmatrix and part.is_injective else None
    if matrices is not None and matrices.conflicts == 1:
        return slot
    vector = shared_access_plan(slot, part, bits).vec
    return slot if bank_conflicts(slot, part, vector, bits) <= worst else None


def _allocate(copy: _Copy) -> Value:
    """The slots, before the loop or the store."""
    builder = Builder(ir.InsertionPoint(copy.loop or copy.store), copy.store.location)
    element = copy.tile.type.element_type
    return allocate_slots(copy.pieces.slots, copy.pieces.slot, element, ALIGNMENT, builder)


def _rewrite(
    module: ir.Module, copy: _Copy, buffer: Value, analysis: AffineAnalysis, *, repeated: bool
) -> None:
    """All but the end (`_finish`). `repeated`: the kernel may have stored by TMA to the same place
    before."""
    store, pieces = copy.store, copy.pieces
    element = copy.tile.type.element_type
    spec = describe(copy.map, pieces.slot.shape, copy.order, element, analysis)
    attributes = {
        "map": i32_attr(add_spec(module.operation, spec)),
        "dims": ir.DenseI32ArrayAttr.get(copy.map.places),
    }
    builder = Builder(ir.InsertionPoint(store), store.location)
    starts = [evaluate(d.coordinate, analysis, lambda value: value, builder) for d in copy.map.dims]
    along = copy.map.places[pieces.axis]
    for number in range(pieces.count):
        _await_slot(copy, number, builder, repeated=repeated)
        start = number * pieces.size
        slot = _write_piece(copy, buffer, number, builder)
        builder.create("mt.proxy_fence", [])
        builder.create("mt.barrier", [])
        corner = list(starts)
        if start:
            step = builder.constant(corner[along].type, start)
            corner[along] = builder.op("arith.addi", step.type, [corner[along], step])
        builder.create("mt.tma_store", [], [slot, *corner], attributes)


def _await_slot(copy: _Copy, number: int, builder: Builder, *, repeated: bool) -> None:
    """Before piece `number` is written: its slot is no longer read; before the first one all that
    was stored to the same argument is there, too, since later stores win. Turns tell as much."""
    slots, place = copy.pieces.slots, copy.before + number
    if place == 0 and _is_waited_for(copy.store.block):
        return
    in_use = place >= slots or (place == 0 and copy.loop is not None)
    if number == 0 and repeated:
        builder.create("mt.tma_store_wait", [], [], {"pending": i32_attr(0)})
    elif in_use:
        _wait_for_reads(slots - 1 if place else 0, builder)
    if in_use:
        builder.create("mt.barrier", [])


def _wait_for_reads(pending: int, builder: Builder) -> None:
    attributes = {"pending": i32_attr(pending), "read": ir.UnitAttr.get()}
    builder.create("mt.tma_store_wait", [], [], attributes)


def _write_piece(copy: _Copy, buffer: Value, number: int, builder: Builder) -> Value:
    """The slot with the piece in it."""
    pieces, tile = copy.pieces, copy.tile
    part = tile
    if pieces.count > 1:
        layout = narrowed(layout_of(tile.type), pieces.axis, pieces.size)
        assert layout is not None, "pieces are made of whole registers"
        attributes = {"axis": i32_attr(pieces.axis), "start": i32_attr(number * pieces.size)}
        type_ = tile_type(tile.type.element_type, layout)
        part = builder.op("mt.narrow", type_, [tile], attributes)
    place = copy.before + number
    index = builder.constant(ir.IntegerType.get_signless(32), place % pieces.slots)
    type_ = mem_type(pieces.slot.shape, tile.type.element_type, pieces.slot)
    slot = builder.op("mt.mem_index", type_, [buffer, index])
    builder.create("mt.local_store", [], [part, slot])
    return slot


def _finish(end: ir.Operation, buffers: Sequence[Value]) -> None:
    """After the outermost loop `end`, or the last store of a block: the buffers' memory may serve
    others."""
    loop = end.name != "mt.store"
    place = ir.InsertionPoint.after(end) if loop else ir.InsertionPoint(end)
    builder = Builder(place, end.location)
    if not (loop and _is_waited_for(end.regions[0].blocks[0])):
        _wait_for_reads(0, builder)
    for buffer in buffers:
        builder.create("mt.local_dealloc", [], [buffer])
