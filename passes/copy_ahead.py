"""Copies loads of loops without dots ahead of time, every thread what it will read itself.

    before: for { %x = load %p; reduce %x }
    after:  buffer [stages]; copies of the first stages-1 iterations; for { wait; copy for iteration
            i+stages-1; reduce(local_load slot) }; wait for all

While rows are reduced, the next ones are on their way; no barrier and no register is spent on it.
Scalars of four bytes or more come along: a lane of each warp copies them for its warp.
Only where the loop itself has num_stages: the copies cost instructions, which loops bound by
instructions lack, and shared memory. Requires: layouts. Ensures: the same values; copies past the
last iteration are masked off.
"""

from __future__ import annotations

from math import prod

from minitriton.ir.axis_analysis import AxisFacts, analyse
from minitriton.ir.builder import Builder
from minitriton.ir.conversion import storage_bits
from minitriton.ir.dialect import element_of
from minitriton.ir.encoding import layout_of, tile_type
from minitriton.ir.linear_layout import LinearLayout
from minitriton.ir.mlir import ir
from minitriton.ir.target import Target
from minitriton.ir.types import bit_width
from minitriton.passes.affine import AffineAnalysis
from minitriton.passes.ahead_of_time import AheadOfTime, is_scalar_load
from minitriton.passes.allocate_shared import bytes_with
from minitriton.passes.global_order import may_overwrite
from minitriton.passes.multi_buffer import Staged, is_fixed, rewrite_loop
from minitriton.passes.op_classes import LOOPS, is_tile
from minitriton.passes.remarks import add_remark
from minitriton.passes.row_groups import row_groups
from minitriton.passes.shared_usage import SHARED_RESERVE
from minitriton.passes.simplify import drop_leftovers
from minitriton.passes.tile_pass import PassOptions
from minitriton.passes.traversal import (
    Value,
    attributes_of,
    block_of,
    defining_op,
    int_attribute,
    is_used,
    kernel_of,
    ops_of,
    walk,
)

COPY_BYTES = 16  # of a thread's copies: smaller ones cost too many instructions
SCALAR_BYTES, MOST_SCALAR_BYTES = 4, 8  # what cp.async copies at least; the widest scalar
_STAGES = "mt.num_stages"
_DOTS = frozenset(("mt.dot", "mt.warpgroup_dot"))


def run(module: ir.Module, target: Target, options: PassOptions) -> None:
    """Rewrites all innermost loops of the kernel that qualify."""
    if not options.pipeline_loads or not target.has("cp_async"):
        return
    function = kernel_of(module)
    loops = [op for op in walk(function) if op.name == "scf.for" and _STAGES in op.attributes]
    facts = analyse(function) if loops else AxisFacts()
    changed = False
    for loop in loops:
        changed |= _rewrite(module, loop, facts, target)
    if changed:
        drop_leftovers(module, options)


def _rewrite(module: ir.Module, loop: ir.Operation, facts: AxisFacts, target: Target) -> bool:
    body = loop.regions[0].blocks[0]
    if any(op.name in _DOTS or op.name in LOOPS for op in walk(loop)):
        return False
    loads = [op for op in ops_of(body) if op.name == "mt.load" and is_tile(op.results[0])]
    entry = kernel_of(module).regions[0].blocks[0]
    if not loads or int_attribute(loop, _STAGES) < 2:
        return False
    if may_overwrite(loop, loads, entry):
        add_remark(module, loop, "loop not copied ahead: it may write memory that it reads")
        return False
    scalars = [op for op in ops_of(body) if op.name == "mt.load" and not is_tile(op.results[0])]
    ahead = AheadOfTime(loop, loads=not may_overwrite(loop, scalars, entry))
    staged = []
    for load in loads:
        found = _staged(load, facts, ahead)
        if isinstance(found, Staged):
            staged.append(found)
        else:
            add_remark(module, load, f"load not copied ahead: {found}")
    if not staged:
        return False
    room, each = _room(module, target), sum(s.bytes for s in staged)
    stages = min(int_attribute(loop, _STAGES), room // each)
    if stages < 2:
        reason = f"an iteration takes {each} bytes of shared memory, of which there are {room}"
        add_remark(module, loop, f"loop not copied ahead: {reason}")
        return False
    warps = int_attribute(module.operation, "mt.num_warps")
    if ahead.loads and stages * (each + MOST_SCALAR_BYTES * warps * len(scalars)) <= room:
        staged += _staged_scalars(warps, scalars, staged, ahead)
    for s in staged:
        ahead.carry(list(s.load.operands)[:2])
    add_remark(module, loop, f"{len(staged)} loads copied ahead in {stages} stages by cp.async")
    rewrite_loop(module, loop, staged, ahead, AffineAnalysis(entry), stages)
    return True


def _room(module: ir.Module, target: Target) -> int:
    """Bytes for the buffers of a loop; where groups have to share memory with a producer's slots,
    of each."""
    room, groups = target.max_shared_bytes - SHARED_RESERVE, row_groups(module)
    return room if groups == 1 else (room - bytes_with(kernel_of(module), [], 1)) // groups


def _staged_scalars(
    warps: int, scalars: list[ir.Operation], staged: list[Staged], ahead: AheadOfTime
) -> list[Staged]:
    """Those of `scalars` that change from iteration to iteration, made tiles of one element a
    warp; not what the addresses of other copies need, which is loaded ahead anyway."""
    needed: set[ir.Operation] = set()
    for s in staged:
        _collect_loads(list(s.load.operands)[:2], ahead.body, needed)
    layout = _one_each(warps)
    slot = LinearLayout.shared(layout.shape, [(n,) for n in _powers(layout.shape[0])])
    found = []
    for load in reversed(scalars):  # what an address needs comes before it
        size = storage_bits(bit_width(load.results[0].type)) // 8
        able = is_scalar_load(load) and load not in needed and ahead.qualifies(load.operands)
        if able and is_used(load) and size >= SCALAR_BYTES and not is_fixed(load, ahead):
            _collect_loads(list(load.operands), ahead.body, needed)
            tile = _as_tile(load, layout)
            found.append(Staged(tile, slot, layout.shape[0] * size, private=True, of_warp=True))
    return found


def _collect_loads(values: list[Value], body: ir.Block, found: set[ir.Operation]) -> None:
    """The loads in `body` that `values` are computed from."""
    for value in values:
        op = None if block_of(value) != body else defining_op(value)
        if op is not None and op not in found:
            if op.name == "mt.load":
                found.add(op)
            _collect_loads(list(op.operands), body, found)


def _one_each(warps: int) -> LinearLayout:
    """Element number w belongs to all lanes of warp w."""
    bits = [(n,) for n in _powers(warps)]
    return LinearLayout.distributed((warps,), [], [(0,)] * 5, bits)


def _as_tile(load: ir.Operation, layout: LinearLayout) -> ir.Operation:
    """Replaces the load of a scalar by that of a tile in which all elements are that scalar."""
    builder = Builder(ir.InsertionPoint(load), load.location)
    operands = [builder.op("mt.splat", tile_type(v.type, layout), [v]) for v in load.operands]
    attributes = attributes_of(load)
    attributes.pop("operandSegmentSizes")
    element = load.results[0].type
    tile = builder.op("mt.load", tile_type(element, layout), operands, attributes)
    load.results[0].replace_all_uses_with(builder.op("mt.unsplat", element, [tile]))
    load.erase()
    return tile.owner.operation


def _staged(load: ir.Operation, facts: AxisFacts, ahead: AheadOfTime) -> Staged | str:
    """How a load can be copied ahead, or why it is not."""
    if "volatile" in load.attributes:
        return "it is volatile"
    if not ahead.qualifies(list(load.operands)[:2]):
        return "its address or mask depends on values loaded or computed in the loop"
    layout, element = layout_of(load.results[0].type), element_of(load.results[0].type)
    size = storage_bits(bit_width(element)) // 8
    if is_fixed(load, ahead):
        return "it is the same in every iteration"
    if layout.free_bits("lane") or layout.free_bits("warp"):
        return "several threads hold the same elements"
    slot = _slot(layout, facts.access_limits(load), COPY_BYTES // size)
    if slot is None:
        return f"no {COPY_BYTES} contiguous bytes of a thread, under one mask, are proved"
    return Staged(load, slot, prod(layout.shape) * size, private=True)


def _slot(layout: LinearLayout, limits: tuple[int, ...], width: int) -> LinearLayout | None:
    """A slot in which each vector of `width` elements of a thread lies in one piece and those of a
    warp one after the other; None where a thread holds no such vectors."""
    bases = dict(layout.bases)
    for dim, limit in enumerate(limits):
        vector = [tuple(n * (d == dim) for d in range(layout.rank)) for n in _powers(width)]
        if limit >= width and all(basis in bases["register"] for basis in vector):
            rest = [b for b in bases["register"] if b not in vector and any(b)]
            return LinearLayout.shared(
                layout.shape, [*vector, *bases["lane"], *bases["warp"], *rest]
            )
    return None


def _powers(limit: int) -> list[int]:
    """1, 2, 4, ... below `limit`."""
    return [1 << bit for bit in range(limit.bit_length() - 1)]
