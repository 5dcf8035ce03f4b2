"""Decides which pipelined loops of a kernel are warp specialised, and whether it is persistent.

Worth it where whole warpgroups multiply and TMA makes all copies: `ring_loops` rewrites such loops,
`persist` wraps the kernel. Remarks give the reason where one of them does not happen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from minitriton.ir.dialect import element_of
from minitriton.ir.mlir import ir
from minitriton.ir.target import Target
from minitriton.ir.types import bit_width
from minitriton.ir.warp_roles import ALL_WARPS
from minitriton.passes import persist, ping_pong, tile_loops
from minitriton.passes.affine import AffineAnalysis
from minitriton.passes.ahead_of_time import AheadOfTime
from minitriton.passes.allocate_shared import OWN_SCRATCH
from minitriton.passes.direct_rows import can_load_directly, load_directly
from minitriton.passes.global_order import innermost_loop, may_overwrite, outermost_loop
from minitriton.passes.multi_buffer import Staged
from minitriton.passes.op_classes import MOVES, WRITES_IN_LOOP
from minitriton.passes.producer_slice import Slice
from minitriton.passes.program_order import heaviest_first
from minitriton.passes.remarks import add_remark, remarks_of
from minitriton.passes.ring_loops import (
    Rows,
    groups_of,
    is_group_id,
    slots_of,
    specialize_loop,
    waited_for,
)
from minitriton.passes.rings import Rings
from minitriton.passes.row_groups import refused, row_groups
from minitriton.passes.shared_usage import SHARED_RESERVE, buffer_bytes, scratch_of
from minitriton.passes.tile_pass import PassOptions
from minitriton.passes.tma_copies import atoms_of
from minitriton.passes.traversal import int_attribute, kernel_of, ops_of, origin, walk
from minitriton.passes.warpgroup_dots import GROUP_WARPS, fits, result_words

# Two warpgroups, with one program or, of 4 warps, one each (`ping_pong`); with one alone, CTAs side
# by side hide each other's arithmetic. Three share a program if the kernel says so (`split_rows`).
CONSUMER_WARPS = 8
# Multiplications of an iteration from which one CTA with a producer beats several without, measured
# on an H200; more where arithmetic between dots can hide behind other CTAs.
ONE_DOT_PRODUCTS, PRODUCTS = 1 << 20, 1 << 21
MAX_RESULTS = 192  # registers per thread for the results of all dots of a loop, of 240
MAX_RESULTS_OF_THREE = 128  # of 160, where three warpgroups multiply
PIECE_BYTES = 16 * 1024  # of all groups' tiles on their way out, by TMA, at least
BARRIER_BYTES = 1024  # all mbarriers of a kernel, at most


class WarpSplit:
    """The producer warp of one kernel, if it gets one."""

    def __init__(self, module: ir.Module, target: Target, options: PassOptions) -> None:
        self._module, self._target = module, target
        self._wanted = options.specialize and options.tma and target.has("setmaxnreg")
        self._shares_registers = options.share_registers
        self._forced = options.force_specialize
        self._rings = Rings(module)
        self._loops: list[ir.Operation] = []
        self._warps = int_attribute(module.operation, "mt.num_warps")
        shared = row_groups(module)
        self.must_take = shared > 1  # all loops with products: nothing else splits the rows
        self._groups = {CONSUMER_WARPS: 1, GROUP_WARPS: ping_pong.NUM_GROUPS}.get(self._warps, 0)
        self._groups = shared if self.must_take else self._groups  # with memory of their own
        self._deals = self._groups > 1 and not self.must_take  # programs to them
        self._reasons: dict[ir.Operation, str] = {}
        self._ends_early = False  # the rings' memory is free after the last loop, for stores

    def take(
        self, loop: ir.Operation, staged: Sequence[Staged], fixed: Sequence[Staged],
        ahead: AheadOfTime, analysis: AffineAnalysis, stages: int,
    ) -> bool:  # fmt: skip
        """Specialises `loop`, whose loads are to be copied as `staged` says (`fixed` ones once), if
        that is possible and pays."""
        if not self._wanted or not self._multiplies(loop):
            return False
        rows = [s for s in staged if s.map is None and can_load_directly(s.load)]
        staged, fixed = (
            [self._for_groups(s, analysis) for s in found] for found in (staged, fixed)
        )
        staged = [s for s in staged if s not in rows]
        reason: str | None = "nothing that it multiplies is copied"
        if any(s not in fixed for s in staged):
            reason = self._refusal(loop, staged, analysis)
        if reason is None and self._deals:
            reason = "some tiles never change" if fixed or rows else None
            reason = reason or ping_pong.refusal(self._module, loop, staged)
        if reason is None:
            moving = groups_of(loop, [s for s in staged if s not in fixed])
            fixed = [s for s in staged if s in fixed]
            parts = self._parts(moving, stages, loop, fixed)
            if parts:
                once = self._rows([fixed], 1, loop, once=True) if fixed else None
                each = [self._rows(groups, slots, loop, once=False) for groups, slots in parts]
                for s in rows:
                    load_directly(s.load, self._warps)
                made, turns = specialize_loop(self._module, loop, each, once, ahead, analysis)
                if turns:
                    self._rings.take_turns()
                if self._deals:
                    assert self._rings.split is not None
                    ping_pong.take_turns(self._module, made, self._rings.split)
                self._loops.append(made)
                counts = " and ".join(str(rows.rings.stages) for rows in each)
                text = f"warp specialised: a producer warp copies {counts} stages by TMA"
                add_remark(self._module, made, text)
                return True
            reason = "its slots do not fit beside the kernel's other shared memory"
        add_remark(self._module, loop, f"not warp specialised: {reason}")
        self._reasons[loop] = reason
        return False

    def check_left(self, loop: ir.Operation) -> None:
        """Of a loop that stays as it is: CompileError if it has products whose rows are split."""
        dots = [op for op in walk(loop) if op.name == "mt.dot" and innermost_loop(op) == loop]
        if self.must_take and dots:
            default = "its products are not made by whole warpgroups out of what TMA has copied"
            reason = self._reasons.get(loop, default)
            found = remarks_of(self._module)
            raise refused(dots[0], f"no producer warp copies for this: {reason}", found)

    def _for_groups(self, staged: Staged, analysis: AffineAnalysis) -> Staged:
        """`staged` with a tile for each group, where its rows are split."""
        if not self.must_take or staged.map is None:
            return staged
        if not any(map(is_group_id, atoms_of(staged.map, analysis))):
            return staged
        return replace(staged, tiles=self._groups, bytes=self._groups * staged.bytes)

    def _parts(
        self, groups: list[list[Staged]], stages: int, loop: ir.Operation, fixed: Sequence[Staged]
    ) -> list[tuple[list[list[Staged]], int]]:
        """Loads in groups and how many slots their rings have, old ones or new ones beside the
        tiles of `fixed`; none where too few fit. Two at least, if the kernel asks for them; where
        only so much fits, one for loads that are done with before the next iteration."""
        loads = [s for group in groups for s in group]
        taken = 0
        if fixed and self._rings.known(slots_of([fixed]), 1, loop, once=True) is None:
            taken = sum(s.bytes for s in fixed)
        room = self._room([*loads, *fixed]) - taken
        fewest = min(stages, 2)
        done = [group for group in groups if fewest > 1 and waited_for(loop, group)]
        rest = [group for group in groups if group not in done]
        alone = not self._deals and not self.must_take
        uneven = [(rest, fewest), (done, 1)] if done and rest and alone else []
        for parts in ([(groups, stages)], uneven):
            found = [self._rings.known(slots_of(g), n, loop, once=False) for g, n in parts]
            if found and all(found):
                slots = [rings.stages for rings in found if rings is not None]
                return [(g, n) for (g, _), n in zip(parts, slots, strict=True)] if room >= 0 else []
        each, once = (sum(s.bytes for g in found for s in g) for found in (groups, done))
        if room < fewest * each and self._may_end_early(loop):
            more = self._room([*loads, *fixed], stored=False) - taken
            if more >= fewest * each - (once if uneven else 0):
                self._ends_early, room = True, more
        if room >= fewest * each:
            return [(groups, min(stages, room // each))]
        return uneven if room >= fewest * each - once else []

    def _may_end_early(self, loop: ir.Operation) -> bool:
        """Whether no ring is needed after `loop`, in whose slots the kernel's stores then go."""
        loops = [op for op in walk(kernel_of(self._module)) if op.name == "scf.for"]
        return loops == [loop] and not self._deals and not self.must_take

    def _rows(
        self, groups: Sequence[Sequence[Staged]], stages: int, loop: ir.Operation, *, once: bool
    ) -> Rows:
        """Rings for loads, old ones or new ones."""
        slots = slots_of(groups)
        rings = self._rings.known(slots, stages, loop, once=once)
        rings = rings or self._rings.make(slots, stages, once=once)
        rings.enter(loop, [other for other in self._rings.sets if other is not rings])
        return Rows(groups, rings)

    def finish(self) -> None:
        """After all loops: makes the kernel persistent where that pays."""
        split = self._rings.split
        if split is None:
            if self.must_take:
                raise refused(kernel_of(self._module), "it has no loop with products")
            return
        for rings in self._rings.sets:
            rings.leave()
        sets = self._rings.sets
        if self._deals:
            dealing = ping_pong.Dealing(self._loops[0], sets[0].stages, split)
            if tile_loops.around(self._loops[0]) is None:
                persist.make_persistent(self._module, split, sets, dealing)
                text = f"persistent: {self._groups} warpgroups run programs of their own, in turns"
            else:
                ping_pong.deal_iterations(self._loops[0], dealing, split)
                text = f"{self._groups} warpgroups take the tiles of its loop in turns"
            add_remark(self._module, split, text)
            return
        if self._ends_early:
            self._rings.end_after(self._loops[0])
            reason: str | None = "what it stores takes the memory of its slots"
        else:
            reason = persist.refusal(kernel_of(self._module), self._loops, sets)
        if reason is None:
            persist.make_persistent(self._module, split, sets)
            add_remark(self._module, split, "persistent: each CTA runs several programs")
            return
        add_remark(self._module, split, f"not persistent: {reason}")
        if heaviest_first(kernel_of(self._module), self._loops):
            add_remark(self._module, split, "the longest programs come first")

    def _multiplies(self, loop: ir.Operation) -> bool:
        """Whether two warpgroups have enough to multiply that a CTA should have an SM alone, or the
        kernel asks for it."""
        if not self._groups:
            return False
        dots = _dots(loop)
        products = sum(map(_products, dots))
        if self._forced or self.must_take or "mt.warp_specialize" in loop.attributes:
            return bool(dots)
        return bool(dots) and products >= (ONE_DOT_PRODUCTS if len(dots) == 1 else PRODUCTS)

    def _refusal(
        self, loop: ir.Operation, staged: Sequence[Staged], analysis: AffineAnalysis
    ) -> str | None:
        top = self._module.operation
        if _is_conditional(loop):
            return "it is inside a branch of a loop, or a while loop"
        dots = _dots(loop)
        if len(dots) > 1 and not self._shares_registers:
            return "nvJitLink ignores setmaxnreg: install nvidia-cuda-nvcc"
        if any(s.map is None for s in staged):
            return "threads make some of its copies"
        most = MAX_RESULTS_OF_THREE if self.must_take else MAX_RESULTS
        if sum(map(result_words, _last_of_chains(dots))) > most * 32 * self._warps:
            return "its products have too many results: ptxas would wait for each wgmma"
        if "mt.maxnreg" in top.attributes:
            return "the kernel sets maxnreg"
        if any(use.owner.operation.name not in MOVES
               for s in staged for use in s.load.results[0].uses):  # fmt: skip
            return "what it loads is also used as it comes"
        function = kernel_of(self._module)
        if any(op.name == "mt.grid_wait" for op in walk(function)):
            return "the kernel waits for the one before it"
        if _writes_before(loop, function):
            return "the kernel writes memory before it"
        around, entry = outermost_loop(loop), function.regions[0].blocks[0]
        if around is not None and may_overwrite(around, [s.load for s in staged], entry):
            return "a loop around it may write what it reads"
        needed = Slice()
        needed.add(loop)
        for s in staged:
            if s.map is not None:
                for value in atoms_of(s.map, analysis):
                    needed.add_value(value)
        return needed.refusal(function)

    def _room(self, staged: Sequence[Staged], *, stored: bool = True) -> int:
        """Bytes for the slots of a new loop, beside all that is needed at some time; without what
        only stores behind all loops need, if not `stored`."""
        scratch, buffers = SHARED_RESERVE if stored else OWN_SCRATCH, BARRIER_BYTES
        for op in walk(kernel_of(self._module)):
            if op.name == "mt.local_alloc":
                buffers += buffer_bytes(op.results[0].type)
            elif not _becomes_a_read(op) and (found := scratch_of(op)) is not None:
                if not stored and _is_stored(op) and outermost_loop(op) is None:
                    continue
                least = PIECE_BYTES // self._groups if _is_stored(op) else found.bytes
                scratch = max(scratch, min(found.bytes, least))
        alignment = max(s.alignment for s in staged)
        return self._target.max_shared_bytes - self._groups * scratch - buffers - alignment


def _dots(loop: ir.Operation) -> list[ir.Operation]:
    """Those of its body that whole warpgroups may make."""
    return [op for op in ops_of(loop.regions[0].blocks[0]) if fits(op)]


def _last_of_chains(dots: list[ir.Operation]) -> list[ir.Operation]:
    """Without those that only serve another one to add to, in the same registers."""
    added_to = [dot.operands[2] for dot in dots]
    return [
        dot for dot in dots
        if dot.results[0] not in added_to or len(list(dot.results[0].uses)) > 1
    ]  # fmt: skip


def _products(dot: ir.Operation) -> int:
    """Multiplications of 16 bits that take as long as those of a dot; of 8 bits count as much."""
    whole = prod(dot.results[0].type.shape) * dot.operands[0].type.shape[-1]
    return whole * max(1, bit_width(element_of(dot.operands[0].type)) // 16)


def _is_conditional(loop: ir.Operation) -> bool:
    """Whether some iterations of a loop around `loop` may skip it, which would lose count of the
    slots; a branch outside of all loops may."""
    around, branch = loop.parent.operation, False
    while around.name != "func.func":
        if around.name == "scf.while" or (around.name == "scf.for" and branch):
            return True
        branch = branch or around.name == "scf.if"
        around = around.parent.operation
    return False


def _writes_before(loop: ir.Operation, function: ir.Operation) -> bool:
    """Whether the program may write global memory before `loop` and those around it: the producer
    would not wait for that."""
    outermost = outermost_loop(loop) or loop
    for op in walk(function):
        if op == outermost:
            break
        if op.name in WRITES_IN_LOOP and ALL_WARPS not in op.attributes:
            return True
    return False


def _is_stored(op: ir.Operation) -> bool:
    """A change of layout just for a store, which TMA will probably make."""
    return op.name == "mt.convert_layout" and all(
        use.owner.operation.name == "mt.store" for use in op.results[0].uses
    )


def _becomes_a_read(op: ir.Operation) -> bool:
    """A change of layout straight after a load in a loop: pipelining makes it a read of a slot."""
    if op.name != "mt.convert_layout":
        return False
    source = origin(op.results[0])
    return (
        source is not None
        and source.name == "mt.load"
        and source.parent.operation.name == "scf.for"
    )
