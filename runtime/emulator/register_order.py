"""Registers of wgmma: accesses by the threads that no wgmma.fence orders before a product.

A product may use registers only after a wgmma.fence that follows every other access to them, and so
may the first product of all; products of one shape that add to the same accumulators need none
between. That holds or not for a whole program, whatever its data, so it is found once, by walking
from each product back to the fences before it; the error is raised when such a product executes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from minitriton.runtime.emulator.module import Ins, Program
from minitriton.runtime.emulator.uninit import has_dest, registers_in

#: By pc of a product, an instruction whose access no fence orders; None: it has no fence at all.
Unfenced = Mapping[int, Ins | None]


def unfenced_products(program: Program) -> Unfenced:
    """Products that some path reaches with an access to their registers after the last fence."""
    code = program.code
    products = [ins for ins in code if _is_product(ins)]
    if not products:
        return {}
    sources: dict[int, list[int]] = {}
    for ins in code:
        for target in ins.targets:
            sources.setdefault(target, []).append(ins.pc)
    found: dict[int, Ins | None] = {}
    for product in products:
        for rival in _accesses_before(code, product, sources):
            found[product.pc] = rival
            break
    return found


def _is_product(ins: Ins) -> bool:
    return ins.op == "wgmma" and "mma_async" in ins.mods


def _accesses_before(
    code: list[Ins], product: Ins, sources: Mapping[int, list[int]]
) -> Iterator[Ins | None]:
    """Accesses on paths back to fences that the product must come after; None for the entry."""
    sums, left = _registers(product)
    seen: set[int] = set()
    work = [product.pc]
    while work:
        pc = work.pop()
        before = list(sources.get(pc, ()))
        if pc == 0:
            yield None
        elif not _never_falls_through(code[pc - 1]):
            before.append(pc - 1)
        for earlier in before:
            if earlier in seen:
                continue
            seen.add(earlier)
            ins = code[earlier]
            if ins.op == "wgmma" and "fence" in ins.mods:
                continue
            if _conflicts(ins, product, sums, left):
                yield ins
            work.append(earlier)


def _never_falls_through(ins: Ins) -> bool:
    return ins.op in ("bra", "brx", "ret", "exit") and ins.guard is None


def _registers(product: Ins) -> tuple[set[int], set[int]]:
    """The accumulators of a product, and the registers that its left operand is in."""
    left = registers_in(product.ops[1]) if len(registers_in(product.ops[1])) > 1 else []
    return {r.index for r in registers_in(product.ops[0])}, {r.index for r in left}


def _conflicts(ins: Ins, product: Ins, sums: set[int], left: set[int]) -> bool:
    """Whether ``ins`` writes what the product uses, or reads what it writes."""
    if _is_product(ins):
        its_sums, its_left = _registers(ins)
        if its_sums & sums and ins.mods != product.mods:
            return True
        return bool(its_sums & left or its_left & sums)
    if not ins.ops:
        return False
    written = {r.index for r in registers_in(ins.ops[0])} if has_dest(ins) else set()
    used = {r.index for operand in ins.ops for r in registers_in(operand)}
    return bool(written & left or used & sums)
