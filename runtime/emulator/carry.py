"""Extended-precision integers: add.cc, addc, sub.cc, subc, mad.cc and madc with the carry flag.

The flag is per lane; sub and subc keep the borrow in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minitriton.runtime.emulator import numerics
from minitriton.runtime.emulator.module import Ins, type_bytes
from minitriton.runtime.emulator.operands import reader, writer

Step = Callable[[Any, Any], None]


def uses_carry(ins: Ins) -> bool:
    """Whether the instruction reads or writes the carry flag."""
    return ins.op in ("addc", "subc", "madc") or "cc" in ins.mods


def chained(ins: Ins) -> Step:
    """One instruction of a carry chain on 32 or 64 bits."""
    bits = 8 * type_bytes(ins.type)
    kind = ins.op.removesuffix("c")
    takes, gives = ins.op != kind, "cc" in ins.mods
    reads = [reader(ins, o, bits) for o in ins.ops[1:]]
    write = writer(ins, ins.ops[0], bits)
    product = None
    if kind == "mad":
        half = frozenset({"hi" if "hi" in ins.mods else "lo"})
        product = numerics.arith("mul", ins.type, half)

    def run(c: Any, ix: Any) -> None:
        values = [read(c, ix) for read in reads]
        if product is not None:
            values = [product(values[0], values[1]), values[2]]
        a, b = values
        chosen = ... if ix is None else ix
        carry = c.carry[chosen] if takes else np.zeros(1, bool)
        if kind == "sub":
            first = a - b
            result = first - carry.astype(a.dtype)
            out = (a < b) | (first < carry)
        else:
            first = a + b
            result = first + carry.astype(a.dtype)
            out = (first < a) | (result < first)
        write(c, ix, result)
        if gives:
            c.carry[chosen] = out

    return run


RULES: dict[str, Callable[[Ins], Step]] = {"addc": chained, "subc": chained, "madc": chained}
