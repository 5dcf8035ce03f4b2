"""Multi-buffers the loads of a loop that feed dots, through cp.async or TMA.

    before: for { %a = load %p; dot(convert %a) }
    after:  buffer [stages]; copies of the first stages-1 iterations; for { wait; barrier; copy for
            iteration i+stages-1; dot(local_load slot) }; wait for all

TMA copies what wgmma will read and a tensor map can describe (`tensor_maps`); threads the rest.
A tile that is the same in every iteration is copied once, before the loop, and stays there. Beside
wgmma a row of numbers comes as a copy, too: to hand it to other warps would take a barrier.
Requires: layouts. Ensures: the same values; copies past the last iteration are masked off. A loop
that may write global memory it reads (`may_overwrite`), and loads whose address or mask cannot be
computed ahead, are left alone; remarks say why.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from minitriton.ir import layouts
from minitriton.ir.axis_analysis import AxisFacts, analyse
from minitriton.ir.conversion import storage_bits
from minitriton.ir.dialect import element_of
from minitriton.ir.encoding import layout_of
from minitriton.ir.matrix_descriptor import ALIGNMENT, operand_span
from minitriton.ir.mlir import ir
from minitriton.ir.ragged import extent
from minitriton.ir.target import Target
from minitriton.ir.types import bit_width
from minitriton.passes.affine import ONE, AffineAnalysis
from minitriton.passes.ahead_of_time import AheadOfTime
from minitriton.passes.global_order import may_overwrite
from minitriton.passes.held_operands import Brought, bring_in
from minitriton.passes.multi_buffer import Staged, is_fixed, rewrite_loop
from minitriton.passes.op_classes import is_tile, keeps_elements, widens
from minitriton.passes.remarks import add_remark
from minitriton.passes.row_groups import registers
from minitriton.passes.shared_usage import SHARED_RESERVE
from minitriton.passes.simplify import drop_leftovers
from minitriton.passes.tensor_maps import NotAffine
from minitriton.passes.tensor_maps import plan as plan_map
from minitriton.passes.tile_pass import PassOptions
from minitriton.passes.tma_copies import atoms_of
from minitriton.passes.traversal import (
    fills_with_nan,
    fills_with_zero,
    int_array,
    int_attribute,
    is_used,
    kernel_of,
    ops_of,
    walk,
)
from minitriton.passes.warp_split import WarpSplit
from minitriton.passes.warpgroup_dots import available, fits, operand_slots

MIN_COPY_BYTES = 4  # cp.async moves 4, 8 or 16 bytes
TURNED_BITS = 16  # of elements that ldmatrix transposes
_REPEATS = frozenset(("mt.join", "mt.broadcast"))
_UNPACKING = _REPEATS | {"mt.expand_dims", "mt.reshape", "mt.trans", "mt.convert_layout"}


def run(module: ir.Module, target: Target, options: PassOptions) -> None:
    """Rewrites all loops of the kernel that qualify."""
    if not options.pipeline_loads or not target.has("cp_async"):
        return
    function = kernel_of(module)
    entry = function.regions[0].blocks[0]
    num_warps = int_attribute(module.operation, "mt.num_warps")
    loops = [op for op in walk(function) if op.name == "scf.for"]
    default = int_attribute(module.operation, "mt.num_stages", 1)
    facts = analyse(function) if loops else AxisFacts()
    wgmma = available(function, target, options)
    tma = options.tma and target.has("tma")
    changed = False
    warps = WarpSplit(module, target, options)
    counts = [int_attribute(loop, "mt.num_stages", default) for loop in loops]
    held = [
        bring_in(loop, entry, num_warps, registers(module)) if wgmma and stages > 1 else None
        for loop, stages in zip(loops, counts, strict=True)
    ]
    for loop, stages, brought in zip(loops, counts, held, strict=True):
        done = _pipeline(module, loop, stages, facts, target, wgmma, tma, warps, brought)
        if brought is not None and not done:
            brought.put_back()
            done = _pipeline(module, loop, stages, facts, target, wgmma, tma, warps)
        changed |= done
        if not done:
            warps.check_left(loop)
    warps.finish()
    if changed:
        drop_leftovers(module, options)


def _pipeline(
    module: ir.Module,
    loop: ir.Operation,
    stages: int,
    facts: AxisFacts,
    target: Target,
    wgmma: bool,
    tma: bool,
    warps: WarpSplit,
    brought: Brought | None = None,
) -> bool:
    feeding = [
        op
        for op in ops_of(loop.regions[0].blocks[0])
        if op.name == "mt.load"
        and is_tile(op.results[0])
        and (_dot_operand(op) is not None or _is_unpacked(op))
    ]
    if not feeding or stages <= 1:
        return False
    body, entry = loop.regions[0].blocks[0], kernel_of(module).regions[0].blocks[0]
    if wgmma and any(map(fits, ops_of(body))):
        feeding += [op for op in ops_of(body) if _is_converted_row(op)]
        if tma:
            feeding += [op for op in ops_of(body) if op not in feeding and _is_turned(op)]
    if may_overwrite(loop, feeding, entry):
        add_remark(module, loop, "loop not pipelined: it may write memory that it reads")
        return False
    scalars = [op for op in ops_of(body) if op.name == "mt.load" and not is_tile(op.results[0])]
    ahead = AheadOfTime(loop, loads=not may_overwrite(loop, scalars, entry))
    analysis = AffineAnalysis(entry)
    staged = _staged(module, feeding, _Facts(ahead, facts, analysis, wgmma, tma))
    if not staged or (brought is not None and not brought.loads <= {s.load for s in staged}):
        return False
    for s in staged:
        ahead.carry(list(s.load.operands)[:2] if s.map is None else atoms_of(s.map, analysis))
    fixed = [s for s in staged if is_fixed(s.load, ahead)]
    per_stage = sum(s.bytes for s in staged if s not in fixed)
    if not per_stage:
        return False
    if warps.take(loop, staged, fixed, ahead, analysis, stages):
        return True
    if warps.must_take:
        return False
    padding = sum(s.alignment for s in staged if s.bytes % s.alignment)
    room = target.max_shared_bytes - SHARED_RESERVE - padding - sum(s.bytes for s in fixed)
    fitting = max(0, room) // per_stage
    if fitting < stages:
        add_remark(module, loop, f"num_stages {stages} reduced to {fitting}: shared memory")
        stages = fitting
    if stages < 2:
        return False
    loop = rewrite_loop(module, loop, staged, ahead, analysis, stages)
    by_tma = sum(s.map is not None for s in staged)
    how = " and ".join(
        f"{count} with {name}"
        for name, count in (("TMA", by_tma), ("cp.async", len(staged) - by_tma))
        if count
    )
    add_remark(module, loop, f"loads pipelined in {stages} stages: {how}")
    dots = [op for op in ops_of(loop.regions[0].blocks[0]) if op.name == "mt.warpgroup_dot"]
    if dots:
        flying = sum("mt.in_flight" in op.attributes for op in dots)
        add_remark(module, loop, f"{len(dots)} dots by wgmma, {flying} of them in flight")
    return True


@dataclass(frozen=True)
class _Facts:
    """What is known about the loads of one loop; tma: whether that may copy."""

    ahead: AheadOfTime
    axis: AxisFacts
    affine: AffineAnalysis
    wgmma: bool
    tma: bool


def _staged(module: ir.Module, feeding: list[ir.Operation], facts: _Facts) -> list[Staged]:
    """Those of the loads that can be copied ahead, and how; remarks say why the others cannot."""
    chosen = []
    for load in feeding:
        reason = _refusal(load, facts.ahead)
        if reason:
            add_remark(module, load, f"load not pipelined: {reason}")
        else:
            chosen.append(load)
    reasons: dict[ir.Operation, NotAffine] = {}
    unrounded: list[ir.Operation] = []  # fp32 that threads would copy, so that wgmma cannot read it
    while True:
        staged = [_with_map(s, facts, reasons) for s in _stage(chosen, unrounded, facts)]
        found = [s.load for s in staged if s.map is None and _is_for_tf32(s)]
        if found:
            unrounded += found
            continue
        turned = [s.load for s in staged if s.map is None and _is_turned(s.load)]
        if turned:
            chosen = [load for load in chosen if load not in turned]
            continue
        plain = [s.load for s in staged if s.map is None]
        filled = [load for load in plain if not fills_with_zero(load)]
        narrow = [load for load in plain if _is_narrow(load, facts.axis) and load not in filled]
        if not (narrow or filled):
            for load, why in reasons.items():
                add_remark(module, load, f"load not by TMA: {why}")
            return staged
        for load in narrow:
            dim, width = _fastest(load, facts.axis)
            reason = f"only {width} contiguous bytes along dimension {dim} are proved"
            add_remark(module, load, f"load not pipelined: {reason}")
        for load in filled:
            add_remark(module, load, "load not pipelined: only TMA fills with NaN")
        chosen = [load for load in chosen if load not in narrow + filled]


def _refusal(load: ir.Operation, ahead: AheadOfTime) -> str | None:
    """Why a load cannot become an asynchronous copy; None if it can."""
    if "volatile" in load.attributes:
        return "it is volatile"
    if not (fills_with_zero(load) or fills_with_nan(load)):
        return "masked elements are neither zero nor NaN"
    if not ahead.qualifies(list(load.operands)[:2]):
        return "its address or mask depends on values loaded or computed in the loop"
    return None


def _is_narrow(load: ir.Operation, facts: AxisFacts) -> bool:
    """Whether no copy by threads is wide enough."""
    return _fastest(load, facts)[1] < MIN_COPY_BYTES


def _fastest(load: ir.Operation, facts: AxisFacts) -> tuple[int, int]:
    """(dimension, bytes) of the widest copy one thread can make."""
    layout = layout_of(load.results[0].type)
    size = storage_bits(bit_width(element_of(load.results[0].type))) // 8
    best = (layout.rank - 1, 0)
    for dim, limit in enumerate(facts.access_limits(load)):
        width = min(limit, layout.contiguous_registers(dim, max(1, 16 // size)).width) * size
        if width > best[1]:
            best = (dim, width)
    return best


def _order(load: ir.Operation, facts: _Facts) -> tuple[int, ...]:
    """The load's dimensions, fastest first."""
    fastest, width = _fastest(load, facts.axis)
    address = facts.affine.of(load.operands[0])
    if width < MIN_COPY_BYTES and address is not None and ONE in address.dims:
        fastest = address.dims.index(ONE)  # masks may hide that the elements are adjacent
    dims = reversed(range(len(load.results[0].type.shape)))
    return (fastest, *(d for d in dims if d != fastest))


def _is_for_tf32(staged: Staged) -> bool:
    is_single = isinstance(element_of(staged.load.results[0].type), ir.F32Type)
    return staged.alignment == ALIGNMENT and is_single


def _stage(loads: list[ir.Operation], unrounded: list[ir.Operation], facts: _Facts) -> list[Staged]:
    orders = [_order(load, facts) for load in loads]
    readable = [pair for pair in zip(loads, orders, strict=True) if pair[0] not in unrounded]
    slots = operand_slots(readable) if facts.wgmma else {}
    staged = []
    for load, order in zip(loads, orders, strict=True):
        type_ = load.results[0].type
        shape = tuple(type_.shape)
        bits = storage_bits(bit_width(type_.element_type))
        span = operand_span(shape, order, bits // 8) if _is_turned(load) else 0
        if span and facts.tma and load not in slots:
            slots[load] = layouts.shared_tma(shape, order, bits, span)
        alignment = ALIGNMENT if load in slots else 1
        slot = slots.get(load) or layouts.shared_for_mma_operand(
            shape, order, bits, _dot_operand(load)
        )
        taken = order if load in slots else ()
        size = extent(slot) * bits // 8
        staged.append(Staged(load, slot, size, alignment, order=taken))
    return staged


def _with_map(staged: Staged, facts: _Facts, reasons: dict[ir.Operation, NotAffine]) -> Staged:
    """`staged` with a tensor map, if TMA can make the copy and wgmma reads it; else `reasons` gets
    why it cannot."""
    if staged.alignment != ALIGNMENT or not facts.tma:
        return staged
    load = staged.load
    size = bit_width(load.results[0].type.element_type) // 8
    try:
        found = plan_map(load, staged.order, size, facts.affine, facts.axis)
    except NotAffine as reason:
        reasons[load] = reason
        return staged
    return replace(staged, map=found)


def _dot_operand(load: ir.Operation) -> int | None:
    """The operand position of a dot that the load reaches through conversions, casts and
    transposes (as seen in the load's own order of dimensions), bytes also through arithmetic
    (scales of quantised operands); None where it reaches none."""
    pending = [(load.results[0], False)]
    quantised = bit_width(element_of(load.results[0].type)) == 8
    while pending:
        value, flipped = pending.pop()
        for use in value.uses:
            user = use.owner.operation
            if user.name == "mt.dot" and use.operand_number < 2:
                return use.operand_number ^ flipped
            moves = user.name in ("mt.convert_layout", "arith.bitcast") or widens(user)
            if moves or (quantised and keeps_elements(user.name)):
                pending += [(result, flipped) for result in user.results]
            elif user.name == "mt.trans":
                order = int_array(user, "order")
                swaps = order[-2:] == [len(order) - 1, len(order) - 2]
                pending.append((user.results[0], flipped ^ swaps))
    return None


def _is_converted_row(op: ir.Operation) -> bool:
    """Whether `op` loads fp32 numbers, a tile of rank 1, and none are used as they come."""
    if op.name != "mt.load" or not is_tile(op.results[0]) or len(op.results[0].type.shape) != 1:
        return False
    users = [use.owner.operation for use in op.results[0].uses]
    single = isinstance(element_of(op.results[0].type), ir.F32Type)
    return single and bool(users) and all(user.name == "mt.convert_layout" for user in users)


def _is_turned(op: ir.Operation) -> bool:
    """Whether `op` loads a tile of 16 bits that products do not read, only for its transpose."""
    if op.name != "mt.load" or not is_tile(op.results[0]) or len(op.results[0].type.shape) != 2:
        return False
    turned = [use.owner.operation for use in op.results[0].uses]
    if any(user.name != "mt.trans" for user in turned):
        return False
    users = [use.owner.operation for user in turned for use in user.results[0].uses]
    users = [user for user in users if is_used(user)]
    return (
        bit_width(element_of(op.results[0].type)) == TURNED_BITS
        and bool(users)
        and all(user.name == "mt.convert_layout" for user in users)
        and _dot_operand(op) is None
    )


def _is_unpacked(load: ir.Operation) -> bool:
    """Whether integers become a dot's operand through arithmetic and mt.join: packed weights."""
    if not isinstance(element_of(load.results[0].type), ir.IntegerType):
        return False
    pending, seen = [(load.results[0], False)], set()
    while pending:
        value, joined = pending.pop()
        for use in value.uses:
            user = use.owner.operation
            if user.name == "mt.dot":
                if joined and use.operand_number < 2:
                    return True
            elif keeps_elements(user.name) or user.name in _UNPACKING:
                after = joined or user.name in _REPEATS
                following = [(result, after) for result in user.results]
                pending += [item for item in following if item not in seen]
                seen.update(following)
    return False
