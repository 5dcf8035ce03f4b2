"""Runs one elementwise op of tile IR over arrays in the emulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from minitriton.ir.context import use
from minitriton.ir.dialect import with_element
from minitriton.ir.layouts import blocked
from minitriton.ir.mlir import ir
from tests.codegen.tile_kernel import TileKernel, run

STORED = {"i1": "i8", "f8E4M3FN": "f8E4M3FN"}  # element type in memory, where it differs
WARPS = 2


def apply(
    name: str,
    result: str,
    operands: Sequence[tuple[str, np.ndarray]],
    attributes: Mapping[str, str] | None = None,
    target: str = "sm_80",
) -> tuple[np.ndarray, str]:
    """(bytes of the result as uint8, PTX) of op `name`; types are MLIR texts, sizes powers of 2.

    i1 operands and results travel as bytes.
    """
    size = len(operands[0][1])
    layout = blocked((size,), (2,), (32,), (WARPS,), (0,))
    with use():
        stored = [STORED.get(t, t) for t in (*(t for t, _ in operands), result)]
        kernel = TileKernel(stored, WARPS, target)
        build = kernel.builder
        i1 = ir.IntegerType.get_signless(1)
        values = []
        for index, (element, _) in enumerate(operands):
            value = kernel.load(index, layout)
            if element == "i1":
                value = build.op("arith.trunci", with_element(value.type, i1), (value,))
            values.append(value)
        type_ = with_element(values[0].type, ir.Type.parse(result))
        parsed = {k: ir.Attribute.parse(v) for k, v in (attributes or {}).items()}
        value = build.op(name, type_, values, parsed)
        if result == "i1":
            i8 = ir.IntegerType.get_signless(8)
            value = build.op("arith.extui", with_element(type_, i8), (value,))
        kernel.store(len(operands), value)
        width = ir.Type.parse(stored[-1]).width // 8
        ptx = kernel.ptx()
    out = np.zeros(size * width, np.uint8)
    run(ptx, [*(np.ascontiguousarray(a) for _, a in operands), out], WARPS)
    return out, ptx
