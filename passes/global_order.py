"""What else a kernel does to global memory before or after one of its stores.

Copies by TMA stores are not ordered with the threads' own accesses. So a store may become one only
where nothing else of the program can touch the same memory on the wrong side of it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from minitriton.ir.dialect import PtrType, element_of
from minitriton.ir.mlir import ir
from minitriton.ir.tensor_map_specs import read_specs
from minitriton.passes.op_classes import LOOPS, MEMORY_ACCESS, WRITES_IN_LOOP
from minitriton.passes.traversal import Value, defining_op, int_attribute, kernel_of, walk

PROGRAMS = "mt.programs"
"""Attribute of a loop whose iterations are programs of the grid: nothing orders what one does to
global memory with what others do."""
_PROMISES = frozenset(("mt.num_stages", "mt.flatten", "mt.warp_specialize"))
_READS = frozenset(("mt.load", "mt.async_copy", "mt.tma_copy"))
_ATOMICS = frozenset(("mt.atomic_rmw", "mt.atomic_cas"))


def bases_of(pointer: Value, entry: ir.Block) -> frozenset[int]:
    """Numbers of the kernel's arguments that `pointer` may be an offset from, several where it was
    selected; empty if unknown, as behind control flow."""
    found: set[int] = set()
    left, seen = [pointer], set()
    while left:
        value = left.pop()
        maker = defining_op(value)
        if maker is None:
            argument = ir.BlockArgument(value)
            if argument.owner != entry:
                return frozenset()
            found.add(argument.arg_number)
        elif maker not in seen:
            seen.add(maker)
            pointers = [v for v in maker.operands if isinstance(element_of(v.type), PtrType)]
            if not pointers or len(maker.regions) or maker.name in MEMORY_ACCESS:
                return frozenset()
            left += pointers
    return frozenset(found)


def _apart(one: frozenset[int], other: frozenset[int]) -> bool:
    """Whether two pointers are known to be offsets from different arguments."""
    return bool(one and other) and not one & other


def _promises(loop: ir.Operation) -> bool:
    """Whether the arguments that a loop stores through do not overlap those it loads from: it asks
    to have loads made ahead of stores, of a later iteration maybe."""
    return any(name in loop.attributes for name in _PROMISES)


def may_overwrite(loop: ir.Operation, feeding: Sequence[ir.Operation], entry: ir.Block) -> bool:
    """Whether the loop may write what `feeding` reads. An option on the loop itself may promise
    that different arguments of the kernel do not overlap."""
    writers = [op for op in walk(loop) if op.name in WRITES_IN_LOOP]
    if not writers:
        return False
    if not _promises(loop) or {op.name for op in writers} != {"mt.store"}:
        return True
    read, written = ([bases_of(op.operands[0], entry) for op in ops] for ops in (feeding, writers))
    return not all(_apart(one, other) for one in read for other in written)


def promised_apart(one: ir.Operation, other: ir.Operation, entry: ir.Block) -> bool:
    """Whether a loop around a load and a store promises that they access different memory."""
    bases = (bases_of(op.operands[0], entry) for op in (one, other))
    return _apart(*bases) and _promised(one, other)


def _promised(one: ir.Operation, other: ir.Operation) -> bool:
    """Whether a loop around both makes promises."""
    others = _parents(other)
    return any(_promises(op) for op in _parents(one) if op in others)


def _parents(op: ir.Operation) -> list[ir.Operation]:
    """The control flow around `op`, inner first."""
    found = []
    op = op.parent.operation
    while op.name != "func.func":
        found.append(op)
        op = op.parent.operation
    return found


class GlobalOrder:
    """The accesses to global memory of one kernel, in program order."""

    def __init__(self, module: ir.Module) -> None:
        function = kernel_of(module)
        self._entry = function.regions[0].blocks[0]
        self._maps = read_specs(module.operation)
        watched = _READS | _ATOMICS | {"mt.store", "mt.effectful_asm"}
        self._accesses = [op for op in walk(function) if op.name in watched]
        self._numbers = {op: number for number, op in enumerate(self._accesses)}

    def obstacle(self, store: ir.Operation, copied: Collection[ir.Operation]) -> str | None:
        """Why `store` must stay what it is while those in `copied` become TMA copies; None where
        it need not. Different arguments may overlap for reads, unless an option of a loop
        around both promises that they do not."""
        bases = self._bases(store)
        for other in self._accesses:
            after, before = self._may_follow(store, other), self._may_follow(other, store)
            if other in copied or not (after or before):
                continue
            if other.name == "mt.effectful_asm":
                return "inline assembly with effects may access the same memory"
            same = not _apart(bases, self._bases(other))
            if other.name in _ATOMICS:
                return "an atomic operation orders it"
            if other.name == "mt.store":
                if same:
                    return "another store may write the same memory"
            elif after and (same or not _promised(store, other)):
                return "a later load may read what it stores"
        return None

    def is_repeated(self, store: ir.Operation, copied: Collection[ir.Operation]) -> bool:
        """Whether one of `copied`, itself or another, may have stored to the same argument."""
        return any(
            self._may_follow(other, store) and not _apart(self._bases(other), self._bases(store))
            for other in copied
        )

    def _bases(self, op: ir.Operation) -> frozenset[int]:
        if op.name == "mt.tma_copy":
            return frozenset((int(self._maps[int_attribute(op, "map")]["base"]),))
        return bases_of(op.operands[0], self._entry)

    def _may_follow(self, first: ir.Operation, second: ir.Operation) -> bool:
        """Whether `second` may run after `first` has."""
        around, others = _parents(first), _parents(second)
        shared = [op for op in around if op in others]
        if any(op.name in LOOPS and PROGRAMS not in op.attributes for op in shared):
            return True
        if (
            shared
            and shared[0].name == "scf.if"
            and _side(first, shared[0]) != _side(second, shared[0])
        ):
            return False
        return self._numbers[first] < self._numbers[second]


def _side(op: ir.Operation, branch: ir.Operation) -> int:
    """Number of the region of `branch` that holds `op`."""
    while op.parent.operation != branch:
        op = op.parent.operation
    blocks = [block for region in branch.regions for block in region.blocks]
    return blocks.index(op.block)


def innermost_loop(op: ir.Operation) -> ir.Operation | None:
    """The loop around `op` that is in no other around it."""
    while op.name != "func.func":
        op = op.parent.operation
        if op.name in LOOPS:
            return op
    return None


def outermost_loop(op: ir.Operation) -> ir.Operation | None:
    """The loop around `op` that no other is around."""
    found = None
    while op.name != "func.func":
        op = op.parent.operation
        if op.name in LOOPS:
            found = op
    return found
