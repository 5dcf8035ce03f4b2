"""What ops of ops_elementwise mean on numpy: scalar functions, inline PTX, unpacking.

Elements come together in C order. PTX is for others to run: whoever interprets hands in how.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from minitriton.ir import interpret_ops as meaning
from minitriton.ir.diagnostics import InternalError
from minitriton.ir.mlir import ir
from minitriton.ir.types import bit_width

if TYPE_CHECKING:
    from minitriton.ir.interpret import Program

# (text, constraints, pack, operands [elements], bits of their and of the results' elements) -> the
# results; unsigned integers hold the bits, the number of elements is a multiple of pack
Assembly = Callable[[str, str, int, list[np.ndarray], list[int], list[int]], list[np.ndarray]]


def _pack(op: ir.Operation) -> int:
    return ir.IntegerAttr(op.attributes["pack"]).value


def _filled(flat: np.ndarray, pack: int) -> np.ndarray:
    """Repeats the last element until groups are full."""
    return np.concatenate([flat, np.repeat(flat[-1:], -len(flat) % pack)])


def _shapes(op: ir.Operation) -> list[tuple[int, ...]]:
    return [meaning.result_shape(result.type) for result in op.results]


def run_map(program: Program, op: ir.Operation, operands: list[Any]) -> Sequence[Any]:
    pack, block = _pack(op), op.regions[0].blocks[0]
    shape = _shapes(op)[0]
    flat = [_filled(np.asarray(v).reshape(-1), pack) for v in operands]
    rows = [
        program.run_block(block, [v[start + i] for v in flat for i in range(pack)])
        for start in range(0, len(flat[0]), pack)
    ]
    results = []
    for number, result in enumerate(op.results):
        own = [value for row in rows for value in row[number * pack : (number + 1) * pack]]
        dtype = meaning.numpy_type(meaning.scalar_type(result.type))
        results.append(np.array(own, dtype)[: np.prod(shape, dtype=int)].reshape(shape))
    return results


def run_asm(program: Program, op: ir.Operation, operands: list[Any]) -> Sequence[Any]:
    if program.assembly is None:
        raise InternalError("interpret", f"no meaning for inline PTX at {op.location}")
    pack = _pack(op)
    elements = [meaning.scalar_type(value.type) for value in op.operands]
    results = [meaning.scalar_type(value.type) for value in op.results]
    flat = [
        _filled(meaning.to_bits(np.asarray(v).reshape(-1), element), pack)
        for v, element in zip(operands, elements, strict=True)
    ]
    found = program.assembly(
        ir.StringAttr(op.attributes["asm"]).value,
        ir.StringAttr(op.attributes["constraints"]).value,
        pack, flat, [bit_width(e) for e in elements], [bit_width(e) for e in results],
    )  # fmt: skip
    return [
        meaning.from_bits(bits[: np.prod(shape, dtype=int)], element).reshape(shape)
        for bits, element, shape in zip(found, results, _shapes(op), strict=True)
    ]


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def unpack_e2m1(program: Program, op: ir.Operation, operands: list[Any]) -> Sequence[Any]:
    codes, element = operands[0].view(np.uint8), meaning.scalar_type(op.results[0].type)
    return [meaning.round_to(E2M1[half], element) for half in (codes & 15, codes >> 4)]


RULES = {
    "mt.unpack_e2m1": unpack_e2m1,
    "mt.map_elementwise": run_map,
    "mt.elementwise_asm": run_asm,
    "mt.effectful_asm": run_asm,
}
