"""Copies loads of loops without dots ahead of time, every thread what it will read itself.

    before: for { %x = load %p; reduce %x }
    after:  buffer [stages]; copies of the first stages-1 iterations; for { wait; copy for iteration
            i+stages-1; reduce(local_load slot) }; wait for all

While rows are reduced, the next ones are on their way; no barrier and no register is spent on it.
Scalars that such a loop loads come an iteration ahead, in registers.
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
from minitriton.ir.encoding import layout_of
from minitriton.ir.linear_layout import LinearLayout
from minitriton.ir.mlir import ir
from minitriton.ir.target import Target
from minitriton.ir.types import bit_width
from minitriton.passes.affine import AffineAnalysis
from minitriton.passes.ahead_of_time import AheadOfTime, is_scalar_load
from minitriton.passes.allocate_shared import bytes_with
from minitriton.passes.global_order import may_overwrite
from minitriton.passes.loop_arguments import give_results, with_arguments, yield_also
from minitriton.passes.multi_buffer import SLT, Staged, compare, is_fixed, rewrite_loop
from minitriton.passes.op_classes import LOOPS, is_tile
from minitriton.passes.remarks import add_remark
from minitriton.passes.row_groups import row_groups
from minitriton.passes.shared_usage import SHARED_RESERVE
from minitriton.passes.simplify import drop_leftovers
from minitriton.passes.tile_pass import PassOptions
from minitriton.passes.traversal import (
    Value,
    int_attribute,
    is_used,
    kernel_of,
    ops_of,
    walk,
)

COPY_BYTES = 16  # of a thread's copies: smaller ones cost too many instructions
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
    if not loads or may_overwrite(loop, loads, entry):
        return False
    scalars = [op for op in ops_of(body) if op.name == "mt.load" and not is_tile(op.results[0])]
    ahead = AheadOfTime(loop, loads=not may_overwrite(loop, scalars, entry))
    staged = [s for load in loads if (s := _staged(load, facts, ahead)) is not None]
    if not staged:
        return False
    room = _room(module, target)
    stages = min(int_attribute(loop, _STAGES), room // sum(s.bytes for s in staged))
    if stages < 2:
        return False
    for s in staged:
        ahead.carry(list(s.load.operands)[:2])
    add_remark(module, loop, f"{len(staged)} loads copied ahead in {stages} stages by cp.async")
    loop = rewrite_loop(module, loop, staged, ahead, AffineAnalysis(entry), stages)
    if ahead.loads:
        _carry_scalars(loop)
    return True


def _room(module: ir.Module, target: Target) -> int:
    """Bytes for the buffers of a loop; where groups have to share memory with a producer's slots,
    of each."""
    room, groups = target.max_shared_bytes - SHARED_RESERVE, row_groups(module)
    return room if groups == 1 else (room - bytes_with(kernel_of(module), [], 1)) // groups


def _carry_scalars(loop: ir.Operation) -> None:
    """Loads the scalars of a loop that does not overwrite them for the next iteration each."""
    ahead = AheadOfTime(loop, loads=False)
    loads = [op for op in ops_of(ahead.body) if is_scalar_load(op) and is_used(op)]
    loads = [op for op in loads if _depends_on_counter(ahead, list(op.operands))]
    if not loads:
        return
    lower, upper, step = list(loop.operands)[:3]
    first = Builder(ir.InsertionPoint(loop), loop.location)

    def load_at(counter: Value, builder: Builder) -> list[Value]:
        known = {ahead.induction: counter}
        ahead.runs = compare(SLT, counter, upper, builder)
        return [ahead.clone(op.results[0], known, builder) for op in loads]

    new, arguments = with_arguments(loop, load_at(lower, first))
    inside = Builder(ir.InsertionPoint.at_block_begin(ahead.body), loop.location)
    following = load_at(inside.op("arith.addi", step.type, [ahead.induction, step]), inside)
    for op, argument in zip(loads, arguments, strict=True):
        op.results[0].replace_all_uses_with(argument)
        op.erase()
    yield_also(new, following)
    give_results(loop, new)
    loop.erase()


def _depends_on_counter(ahead: AheadOfTime, values: list[Value]) -> bool:
    """Whether the loop's counter and what does not change in it are all that `values` depend on."""
    if not ahead.qualifies(values):
        return False
    ahead.carry(values)
    found, ahead.carried = not ahead.carried, []
    return found and not all(map(ahead.is_invariant, values))


def _staged(load: ir.Operation, facts: AxisFacts, ahead: AheadOfTime) -> Staged | None:
    """How a load can be copied ahead, if it can, changes in the loop, and is wide enough."""
    if "volatile" in load.attributes or not ahead.qualifies(list(load.operands)[:2]):
        return None
    layout, element = layout_of(load.results[0].type), element_of(load.results[0].type)
    size = storage_bits(bit_width(element)) // 8
    if is_fixed(load, ahead) or layout.free_bits("lane") or layout.free_bits("warp"):
        return None
    slot = _slot(layout, facts.access_limits(load), COPY_BYTES // size)
    return None if slot is None else Staged(load, slot, prod(layout.shape) * size, private=True)


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
