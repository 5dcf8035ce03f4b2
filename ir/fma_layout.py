"""Operand layouts of a dot that runs on scalar fused multiply-adds."""

from __future__ import annotations

from minitriton.ir.linear_layout import LinearLayout, hull, log2_exact
from minitriton.ir.register_maps import broadcast_registers


def fma_operand(c_layout: LinearLayout, op_index: int, k: int) -> LinearLayout:
    """Layout of a ([.., M, k], op_index 0) or b ([.., k, N], op_index 1) for accumulator layout.

    Each thread holds the rows of a (columns of b) that its accumulator elements need, with all
    of K in its lowest register bits; bits of c that move along the other side replicate.
    """
    rank = c_layout.rank
    inner = rank - 1 if op_index == 0 else rank - 2
    narrow = c_layout.squeeze_dim_to_one(inner)
    shape = (*narrow.shape[:inner], k, *narrow.shape[inner + 1 :])
    steps = [1 << bit for bit in range(log2_exact(hull(k)))]
    along_k = tuple(tuple(step * (dim == inner) for dim in range(rank)) for step in steps)
    bases = dict(narrow.bases)
    bases["register"] = (*along_k, *bases["register"])
    return narrow.with_shape(shape, bases)


def fma_operand_registers(c_layout: LinearLayout, op_index: int, k: int) -> list[int]:
    """Per register of the accumulator, the register of its `fma_operand` at position 0 of K."""
    inner = c_layout.rank - 1 if op_index == 0 else c_layout.rank - 2
    return [hull(k) * register for register in broadcast_registers(c_layout, inner)]
