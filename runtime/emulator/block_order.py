"""Puts basic blocks into an order in which lanes at the lowest pc first reconverge like a GPU's.

ptxas makes the lanes of a warp meet again at the immediate post-dominator of a divergent branch,
wherever LLVM has placed that block. In reverse post-order of the control-flow graph, with the
exits of a loop after its body, every such join comes after the paths that lead to it, so that
"lowest pc first" brings all lanes there together (the order of thread frontiers: Diamos et al.,
"SIMD re-convergence at thread frontiers", 2011).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from minitriton.runtime.emulator.module import Ins, Program


@dataclasses.dataclass(slots=True)
class _Block:
    start: int
    end: int  # exclusive
    falls: int | None  # pc of the block that follows without a jump
    successors: list[int]  # pcs, fall-through last


def reorder(program: Program) -> Program:
    """`program` with its blocks in reconvergence order; unreachable ones are dropped."""
    blocks = _blocks(program)
    order = _order(blocks)
    code: list[Ins] = []
    placed: dict[int, int] = {}
    for index, start in enumerate(order):
        block = blocks[start]
        placed[start] = len(code)
        code += program.code[block.start : block.end]
        following = order[index + 1] if index + 1 < len(order) else None
        if block.falls is not None and block.falls != following:
            last = program.code[block.end - 1]
            jump = dataclasses.replace(last, op="bra", mods=("uni",), ops=(), guard=None)
            jump.targets = (block.falls,)
            code.append(jump)
    for pc, ins in enumerate(code):
        ins.pc = pc
        ins.targets = tuple(placed[t] for t in ins.targets)
    program.code = code
    program.branch_targets = frozenset(t for ins in code for t in ins.targets)
    return program


def _blocks(program: Program) -> dict[int, _Block]:
    code = program.code
    leaders = {0, *(t for ins in code for t in ins.targets)}
    leaders |= {ins.pc + 1 for ins in code if ins.op in ("bra", "brx", "exit", "ret")}
    starts = sorted(pc for pc in leaders if pc < len(code))
    blocks = {}
    for start, end in zip(starts, [*starts[1:], len(code)], strict=True):
        last = code[end - 1]
        ends_here = last.op in ("bra", "brx", "exit", "ret") and last.guard is None
        falls = end if not ends_here and end < len(code) else None
        successors = list(dict.fromkeys(last.targets))
        if falls is not None:
            successors = [t for t in successors if t != falls] + [falls]
        blocks[start] = _Block(start, end, falls, successors)
    return blocks


def _order(blocks: dict[int, _Block]) -> list[int]:
    """Reverse post-order; a block's successors outside of its loops are visited first."""
    loops = _loops(blocks)

    def visits(start: int) -> list[int]:
        mine = loops[start]
        return sorted(blocks[start].successors, key=lambda s: len(mine & loops[s]))

    return _postorder(blocks, visits)[::-1]


def _postorder(blocks: dict[int, _Block], visits: Callable[[int], list[int]]) -> list[int]:
    done: list[int] = []
    seen = {0}
    stack = [(0, iter(visits(0)))]
    while stack:
        start, pending = stack[-1]
        for successor in pending:
            if successor not in seen:
                seen.add(successor)
                stack.append((successor, iter(visits(successor))))
                break
        else:
            done.append(start)
            stack.pop()
    return done


def _loops(blocks: dict[int, _Block]) -> dict[int, frozenset[int]]:
    """For each block the headers of the natural loops that it belongs to."""
    order = _postorder(blocks, lambda start: blocks[start].successors)
    dominators = _dominators(blocks, order[::-1])
    predecessors: dict[int, list[int]] = {start: [] for start in blocks}
    for start in order:
        for successor in blocks[start].successors:
            predecessors[successor].append(start)
    members: dict[int, set[int]] = {start: set() for start in blocks}
    for tail in order:
        for header in blocks[tail].successors:
            if header in dominators[tail]:
                body, pending = {header}, [tail]
                while pending:
                    block = pending.pop()
                    if block not in body:
                        body.add(block)
                        pending += predecessors[block]
                for block in body:
                    members[block].add(header)
    return {start: frozenset(found) for start, found in members.items()}


def _dominators(blocks: dict[int, _Block], order: list[int]) -> dict[int, set[int]]:
    everything = set(order)
    dominators = dict.fromkeys(order, everything)
    dominators[0] = {0}
    predecessors: dict[int, list[int]] = {start: [] for start in order}
    for start in order:
        for successor in blocks[start].successors:
            predecessors[successor].append(start)
    changed = True
    while changed:
        changed = False
        for start in order[1:]:
            meet = set.intersection(*(dominators[p] for p in predecessors[start])) | {start}
            if meet != dominators[start]:
                dominators[start], changed = meet, True
    return dominators
