"""Tiles that hold KDA's states, or their gradients, while a scan goes from chunk to chunk.

TURNED: a state is held transposed, [V, K], and so is all else that has V columns: then whole
warpgroups multiply what they hold in registers with operands as they lie in memory. A state is held
in PARTS tiles of PART channels of K each.
"""

from __future__ import annotations

from typing import NamedTuple

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels import kda_tiles as tiles


class ScanTile(NamedTuple):
    """How a program of the scan runs."""

    columns: int  # of V
    warps: int
    part: int  # channels of K in a piece of the state
    stages: int
    turned: bool


@triton.jit
def turn(x, TURNED: tl.constexpr):
    return tl.trans(x) if TURNED else x


@triton.jit
def down(x, TURNED: tl.constexpr):
    """Numbers of rows: a column, or a row of what is transposed."""
    return x[None, :] if TURNED else x[:, None]


@triton.jit
def times(x, held, total, TURNED: tl.constexpr, PRECISION: tl.constexpr):
    """total (or None) + x held, of which total, held and the result are transposed if TURNED."""
    if TURNED:
        return tl.dot(held, tl.trans(x), total, input_precision=PRECISION)
    return tl.dot(x, held, total, input_precision=PRECISION)


@triton.jit
def _state_places(key, column, p, keys, columns, key_stride, column_stride, TURNED: tl.constexpr,
                  PART: tl.constexpr):  # fmt: skip
    """Where part `p` of a state lies from its first element on, and which elements exist."""
    key, column = down(key, TURNED), down(column, not TURNED)
    at = (p * PART + key) * key_stride + column * column_stride
    return at, (key < keys - p * PART) & (column < columns)


@triton.jit
def load_state(ptr, key, column, keys, columns, key_stride, column_stride,
               INITIAL: tl.constexpr, TURNED: tl.constexpr, PARTS: tl.constexpr,
               PART: tl.constexpr):  # fmt: skip
    """The state before the first chunk, in PARTS tiles; zeros without INITIAL."""
    state = ()
    for p in tl.static_range(PARTS):
        at, inside = _state_places(
            key, column, p, keys, columns, key_stride, column_stride, TURNED, PART
        )
        if INITIAL:
            state = state + (tl.load(ptr + at, mask=inside, other=0.0),)
        else:
            state = state + (tl.zeros(at.shape, tl.float32),)
    return state


@triton.jit
def rounded(state, DTYPE: tl.constexpr, PARTS: tl.constexpr):
    """The parts of a state as operands of products."""
    made = ()
    for p in tl.static_range(PARTS):
        made = made + (state[p].to(DTYPE),)
    return made


@triton.jit
def store_state(ptr, state, key, column, keys, columns, key_stride, column_stride,
                TURNED: tl.constexpr, TURNS: tl.constexpr, PARTS: tl.constexpr,
                PART: tl.constexpr):  # fmt: skip
    """Writes a state; TURNS: it is turned for that, as rows of [keys, columns] are long."""
    for p in tl.static_range(PARTS):
        at, inside = _state_places(
            key, column, p, keys, columns, key_stride, column_stride, TURNED != TURNS, PART
        )
        tl.store(ptr + at, turn(state[p].to(ptr.dtype.element_ty), TURNS), mask=inside)


@triton.jit
def store_rows(ptr, x, rows, column, columns, stride, TURNED: tl.constexpr):
    """Writes x [CHUNK, VALUES], or its transpose, where there are `rows` and `columns`."""
    row = tl.arange(0, tiles.CHUNK)[:, None]
    mask = (row < rows) & (column[None, :] < columns)
    x = turn(x.to(ptr.dtype.element_ty), TURNED)
    tl.store(ptr + (row * stride + column[None, :]), x, mask=mask)
