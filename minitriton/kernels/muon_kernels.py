"""Kernels of Muon: momentum, Gram matrices, the iteration on them, and its product with the matrix.

X [.., m, n] with m <= n has singular values s. In exact arithmetic the quintic iteration
X <- (a + b A + c A A) X with A = X X^T only multiplies X from the left by polynomials of the first
A, so it can run on m x m matrices alone:

    Z = a I + b R + c R R,    Q <- Z Q,    R <- Z R Z        (R = X X^T, Q = I at first)

All of these commute and are symmetric: only tiles on and below the diagonal are computed. Rounding
makes R drift from Q X X^T Q, so after two steps, and after three more, X <- Q X is formed and R
computed from it (`_runs`). R, Z, Q are fp32 in memory and meet in tf32; where X is bf16 or fp16 it
enters R as it is and Q X in fp16, normalised. Up to m = 256 one program iterates on a matrix, which
stays in L2; beyond that every product is a launch, with a program for each of its tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels.row_blocks import row_block, row_blocks
from minitriton.kernels.rows import new_like

MATRICES: tl.constexpr = tl.constexpr(5)  # of the iteration per block: R, Z, Z R, and Q twice
SMALL, LARGE = 64, 128  # rows of a tile
WIDEST_ALONE = 256  # rows of a matrix that one program iterates on
COLUMNS = 128  # of a tile of Q X
ENOUGH = 264  # programs that keep a GPU busy
NORM_EPS = 1e-7


@triton.jit
def _momentum_kernel(
    grad_ptr, buffer_ptr, out_ptr, grad_stride, buffer_stride, rows, columns, momentum,
    NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, first = row_block(BLOCK)
    if row >= rows:
        return
    row = row.to(tl.int64)
    at = first + tl.arange(0, BLOCK)
    mask = at < columns
    grad = tl.load(grad_ptr + row * grad_stride + at, mask=mask).to(tl.float32)
    buffer_ptr += row * buffer_stride
    new = momentum * tl.load(buffer_ptr + at, mask=mask).to(tl.float32) + grad
    tl.store(buffer_ptr + at, new.to(buffer_ptr.dtype.element_ty), mask=mask)
    if NESTEROV:
        new = momentum * new + grad
        tl.store(out_ptr + row * columns + at, new.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _below_diagonal(t):
    """(i, j) with j <= i of the t-th tile: (0, 0), (1, 0), (1, 1), (2, 0), ..."""
    i = 0
    while t > i:
        i += 1
        t -= i
    return i, t


@triton.jit
def _places(i, j, size, TILE: tl.constexpr):
    """Offsets of tile (i, j) and of its mirror image, in int64 if size is."""
    row, column = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    return row[:, None] * size + column[None, :], column[None, :] * size + row[:, None]


@triton.jit
def _store_both(to_ptr, value, i, j, size, TILE: tl.constexpr, ONE_TILE: tl.constexpr):
    """Tile (i, j) and its mirror image."""
    here, mirrored = _places(i, j, size, TILE)
    tl.store(to_ptr + here, value)
    if ONE_TILE:
        return
    if i != j:
        tl.store(to_ptr + mirrored, value)


@triton.jit
def _gram_kernel(
    x_ptr, out_ptr, block_stride, row_stride, column_stride, rows, columns, size, share,
    ONE_TILE: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block, split = tl.program_id(2).to(tl.int64), tl.program_id(1)
    i, j = _below_diagonal(tl.program_id(0))
    x_ptr += block * block_stride
    row, mirror = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    depth = tl.arange(0, DEPTH)
    acc = tl.zeros([TILE, TILE], tl.float32)
    row_ptr = x_ptr + row.to(tl.int64)[:, None] * row_stride
    mirror_ptr = x_ptr + mirror.to(tl.int64)[:, None] * row_stride
    for first in tl.range(split * share, tl.minimum(columns, (split + 1) * share), DEPTH):
        column = first + depth[None, :]
        at = column.to(tl.int64) * column_stride
        inside = column < columns
        x = tl.load(row_ptr + at, mask=(row < rows)[:, None] & inside, other=0.0)
        if ONE_TILE:
            y = x
        else:
            y = tl.load(mirror_ptr + at, mask=(mirror < rows)[:, None] & inside, other=0.0)
        acc = tl.dot(x, tl.trans(y), acc, input_precision=PRECISION)
    size = size.to(tl.int64)
    out_ptr += (block * tl.num_programs(1) + split) * size * size
    _store_both(out_ptr, acc, i, j, size, TILE, ONE_TILE)


@triton.jit
def _product(
    a_ptr, b_ptr, i, j, size, TILE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr
):
    """Tile (i, j) of a b, with b symmetric."""
    depth = tl.arange(0, DEPTH)[None, :]
    a_ptr += (i * TILE + tl.arange(0, TILE))[:, None] * size + depth
    b_ptr += (j * TILE + tl.arange(0, TILE))[:, None] * size + depth
    acc = tl.zeros([TILE, TILE], tl.float32)
    for first in tl.range(0, size, DEPTH):
        a, b = tl.load(a_ptr + first), tl.load(b_ptr + first)
        acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _polynomial(
    r_ptr, i, j, size, a, b, c,
    TILE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Tile (i, j) of a I + b R + c R R."""
    square = _product(r_ptr, r_ptr, i, j, size, TILE, DEPTH, PRECISION)
    here, _ = _places(i, j, size, TILE)
    diagonal = tl.arange(0, TILE)[:, None] == tl.arange(0, TILE)[None, :]
    return c * square + b * tl.load(r_ptr + here) + tl.where(diagonal & (i == j), a, 0.0)


@triton.jit
def _multiply(
    a_ptr, b_ptr, to_ptr, size,
    TILE: tl.constexpr, TILES: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """to = a b for symmetric matrices that commute; to is neither."""
    for t in tl.range(TILES):
        i, j = _below_diagonal(t)
        acc = _product(a_ptr, b_ptr, i, j, size, TILE, DEPTH, PRECISION)
        _store_both(to_ptr, acc, i, j, size, TILE, TILES == 1)
    tl.debug_barrier()


@triton.jit
def _scale(partial_ptr, splits, size, eps, BLOCK: tl.constexpr):
    """1 / (|X| + eps), from the diagonals of the parts of its Gram matrix."""
    square = tl.zeros([BLOCK], tl.float32)
    for split in tl.range(splits):
        for first in tl.range(0, size, BLOCK):
            at = first + tl.arange(0, BLOCK)
            diagonal = partial_ptr + (split * size * size + at * (size + 1))
            square += tl.load(diagonal, mask=at < size, other=0.0)
    return 1 / (tl.sqrt(tl.sum(square)) + eps)


@triton.jit
def _total(partial_ptr, to_ptr, i, j, splits, size, scale, TILE: tl.constexpr, ONE: tl.constexpr):
    """Tile (i, j) of R, the sum of the parts of a Gram matrix times the square of `scale`."""
    here, _ = _places(i, j, size, TILE)
    acc = tl.zeros([TILE, TILE], tl.float32)
    for split in tl.range(splits):
        acc += tl.load(partial_ptr + split * size * size + here)
    _store_both(to_ptr, acc * scale * scale, i, j, size, TILE, ONE)


@triton.jit(do_not_specialize=["splits", "steps", "normalise"])
def _iterate_kernel(
    partial_ptr, scale_ptr, work_ptr, out_ptr, splits, size, steps, normalise, a, b, c, eps,
    BLOCK: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    area = size * size
    r_ptr = work_ptr + block * (MATRICES * area)
    z_ptr, t_ptr, q_ptr = r_ptr + area, r_ptr + 2 * area, r_ptr + 3 * area
    partial_ptr += block * splits * area
    scale = 1.0
    if normalise != 0:
        scale = _scale(partial_ptr, splits, size, eps, BLOCK)
        tl.store(scale_ptr + block, scale)
    for t in tl.range(TILES):
        i, j = _below_diagonal(t)
        _total(partial_ptr, r_ptr, i, j, splits, size, scale, TILE, TILES == 1)
    tl.debug_barrier()
    for step in tl.range(steps):
        for t in tl.range(TILES):
            i, j = _below_diagonal(t)
            z = _polynomial(r_ptr, i, j, size, a, b, c, TILE, DEPTH, PRECISION)
            _store_both(z_ptr, z, i, j, size, TILE, TILES == 1)
            if step == 0:
                _store_both(q_ptr, z, i, j, size, TILE, TILES == 1)
        tl.debug_barrier()
        if step > 0:
            old_ptr, new_ptr = q_ptr + (step - 1) % 2 * area, q_ptr + step % 2 * area
            _multiply(z_ptr, old_ptr, new_ptr, size, TILE, TILES, DEPTH, PRECISION)
        if step < steps - 1:
            _multiply(z_ptr, r_ptr, t_ptr, size, TILE, TILES, DEPTH, PRECISION)
            _multiply(t_ptr, z_ptr, r_ptr, size, TILE, TILES, DEPTH, PRECISION)
    q_ptr += (steps - 1) % 2 * area
    out_ptr += block * area
    for t in tl.range(TILES):
        i, j = _below_diagonal(t)
        here, _ = _places(i, j, size, TILE)
        q = tl.load(q_ptr + here).to(out_ptr.dtype.element_ty)
        _store_both(out_ptr, q, i, j, size, TILE, TILES == 1)


@triton.jit
def _scale_kernel(partial_ptr, scale_ptr, splits, size, eps, BLOCK: tl.constexpr):
    block, size = tl.program_id(0).to(tl.int64), size.to(tl.int64)
    scale = _scale(partial_ptr + block * splits * size * size, splits, size, eps, BLOCK)
    tl.store(scale_ptr + block, scale)


@triton.jit
def _total_kernel(
    partial_ptr, scale_ptr, r_ptr, splits, size, SCALED: tl.constexpr, TILE: tl.constexpr
):
    block, size = tl.program_id(1).to(tl.int64), size.to(tl.int64)
    i, j = _below_diagonal(tl.program_id(0))
    scale = 1.0
    if SCALED:
        scale = tl.load(scale_ptr + block)
    partial_ptr += block * splits * size * size
    _total(partial_ptr, r_ptr + block * size * size, i, j, splits, size, scale, TILE, False)


@triton.jit
def _product_kernel(
    a_ptr, b_ptr, to_ptr, size, a, b, c,
    POLYNOMIAL: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """to = A B for symmetric matrices that commute, or a I + b A + c A A."""
    block, size = tl.program_id(1).to(tl.int64), size.to(tl.int64)
    i, j = _below_diagonal(tl.program_id(0))
    first = block * size * size
    if POLYNOMIAL:
        value = _polynomial(a_ptr + first, i, j, size, a, b, c, TILE, DEPTH, PRECISION)
    else:
        value = _product(a_ptr + first, b_ptr + first, i, j, size, TILE, DEPTH, PRECISION)
    value = value.to(to_ptr.dtype.element_ty)
    _store_both(to_ptr + first, value, i, j, size, TILE, False)


@triton.jit
def _apply_kernel(
    q_ptr, x_ptr, scale_ptr, out_ptr, lr_ptr, x_block, x_row, x_column, out_block, out_row,
    out_column, rows, columns, size, lr, decay, factor,
    SCALED: tl.constexpr, UPDATE: tl.constexpr, LR_IN_MEMORY: tl.constexpr, TILE: tl.constexpr,
    DEPTH: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    scale = 1.0
    if SCALED:
        scale = tl.load(scale_ptr + block)
    q_ptr += block * size * size
    x_ptr += block * x_block
    acc = tl.zeros([TILE, COLUMNS], tl.float32)
    for first in tl.range(0, size, DEPTH):
        k = first + depth
        q = tl.load(q_ptr + row.to(tl.int64)[:, None] * size + k[None, :])
        at = k.to(tl.int64)[:, None] * x_row + column.to(tl.int64)[None, :] * x_column
        mask = (k < rows)[:, None] & (column < columns)[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0)
        if SCALED and q.dtype == tl.float16:  # whose range needs a norm of one
            x = (x.to(tl.float32) * scale).to(tl.float16)
        acc = tl.dot(q, x, acc, input_precision=PRECISION)
    if SCALED and q_ptr.dtype.element_ty == tl.float32:
        acc *= scale
    out_ptr += block * out_block
    at = row.to(tl.int64)[:, None] * out_row + column.to(tl.int64)[None, :] * out_column
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    if UPDATE:
        if LR_IN_MEMORY:
            lr = tl.load(lr_ptr).to(tl.float32)
        weight = tl.load(out_ptr + at, mask=mask, other=0.0).to(tl.float32)
        acc = (1 - lr * decay) * weight - lr * factor * acc
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=mask)


def momentum_step(
    grad: torch.Tensor, buffer: torch.Tensor, momentum: float, nesterov: bool
) -> torch.Tensor:
    """buffer <- momentum * buffer + grad, in place; returns what the step follows.

    grad, buffer: [rows, columns] with contiguous rows. The result has the dtype of buffer: it is
    buffer itself or, with nesterov, momentum * buffer + grad.
    """
    out = new_like(buffer) if nesterov else buffer
    rows, columns = buffer.shape
    _momentum_kernel[row_blocks(rows, columns, 1024)](
        grad, buffer, out, grad.stride(0), buffer.stride(0), rows, columns, momentum,
        NESTEROV=nesterov, BLOCK=1024,
    )  # fmt: skip
    return out


def _runs(steps: int) -> list[int]:
    """Steps of the iteration on one Gram matrix each: 2, 3, 3, ..."""
    return [min(2, steps), *(min(3, steps - done) for done in range(2, steps, 3))]


@dataclass(frozen=True)
class Iteration:
    """What to iterate: steps, (a, b, c), and how fp32 is multiplied, "tf32" or "tf32x3"."""

    steps: int
    coefficients: tuple[float, float, float]
    precision: str


@dataclass(frozen=True)
class Update:
    """W <- (1 - lr decay) W - lr factor O; lr on the device where `lr_tensor` is given."""

    lr: float
    lr_tensor: torch.Tensor | None
    decay: float
    factor: float


def orthogonalise(
    x: torch.Tensor, iteration: Iteration, out: torch.Tensor, update: Update | None = None
) -> None:
    """Writes the iterate O of x into out, or updates out with it.

    x, out: [blocks, m, n] with 1 <= m <= n, of any strides. Above m = 256 as many blocks at a time
    as fill a GPU: their matrices take half a gigabyte, or 20 m m bytes if that is more.
    """
    blocks, rows, _ = x.shape
    tile = _tile(rows, iteration.precision)
    size = triton.cdiv(rows, tile) * tile
    count = blocks if rows <= WIDEST_ALONE else max(1, 4 * ENOUGH // _tiles(size, tile))
    for first in range(0, blocks, count):
        some = slice(first, first + count)
        _orthogonalise_some(x[some], size, iteration, out[some], update)


def _orthogonalise_some(
    x: torch.Tensor, size: int, iteration: Iteration, out: torch.Tensor, update: Update | None
) -> None:
    (blocks, rows, columns), alone = x.shape, x.shape[1] <= WIDEST_ALONE
    programs = blocks * (1 if alone else _tiles(size, _tile(rows, iteration.precision)))
    splits = max(1, min(triton.cdiv(columns, 512), ENOUGH // programs))
    kind = torch.float32 if x.dtype == torch.float32 else torch.float16
    room = partial(torch.empty, dtype=torch.float32, device=x.device)
    parts, scale = room(blocks, splits, size, size), room(blocks)
    matrices = MATRICES.value if alone else 4
    work = room(blocks, matrices, size, size) if alone else room(matrices, blocks, size, size)
    q = torch.empty(blocks, size, size, dtype=kind, device=x.device)
    runs = _runs(iteration.steps)
    for index, steps in enumerate(runs):
        _gram(x, parts, iteration.precision)
        iterate = _iterate_alone if alone else _iterate_tiled
        iterate(parts, scale if index == 0 else None, work, q, steps, iteration)
        last = index == len(runs) - 1
        to = out if last else new_like(x, kind)
        first_scale = scale if index == 0 else None
        _apply(q, x, first_scale, to, update if last else None, iteration.precision)
        x = to


def _iterate_alone(
    parts: torch.Tensor, scale: torch.Tensor | None, work: torch.Tensor, q: torch.Tensor,
    steps: int, iteration: Iteration,
) -> None:  # fmt: skip
    """q = the product of the polynomials of `steps` steps, a program for each block.

    parts: [blocks, splits, m, m], those of the Gram matrix; scale: room for 1 / |X|, by which X is
    divided where it is given; work: room for the matrices of the iteration.
    """
    blocks, splits, size = parts.shape[:3]
    _iterate_kernel[(blocks,)](
        parts, work if scale is None else scale, work, q, splits, size, steps,
        int(scale is not None), *iteration.coefficients, NORM_EPS,
        BLOCK=triton.next_power_of_2(size), TILE=SMALL, TILES=_tiles(size, SMALL), DEPTH=32,
        PRECISION=iteration.precision, num_warps=8,
    )  # fmt: skip


def _iterate_tiled(
    parts: torch.Tensor, scale: torch.Tensor | None, work: torch.Tensor, q: torch.Tensor,
    steps: int, iteration: Iteration,
) -> None:  # fmt: skip
    """As `_iterate_alone`, a program for each tile of a product."""
    blocks, splits, size = parts.shape[:3]
    tile = _tile(size, iteration.precision)
    grid = (_tiles(size, tile), blocks)
    if scale is not None:
        _scale_kernel[(blocks,)](parts, scale, splits, size, NORM_EPS, BLOCK=1024)
    r, z, t, f = work.unbind()
    _total_kernel[grid](
        parts, parts if scale is None else scale, r, splits, size, SCALED=scale is not None,
        TILE=tile, num_warps=8,
    )  # fmt: skip

    def multiply(a: torch.Tensor, b: torch.Tensor, to: torch.Tensor, polynomial: bool) -> None:
        _product_kernel[grid](
            a, b, to, size, *iteration.coefficients, POLYNOMIAL=polynomial, TILE=tile, DEPTH=32,
            PRECISION=iteration.precision, num_warps=8,
        )  # fmt: skip

    for step in range(steps):
        last = step == steps - 1
        multiply(r, r, q if steps == 1 else z, True)
        if not last:
            multiply(z, r, t, False)
            multiply(t, z, r, False)
        if step == 0:
            z, f = f, z
        else:
            multiply(z, f, q if last else t, False)
            t, f = f, t


def _tile(rows: int, precision: str) -> int:
    """128 where one such tile is a block, or where there are many; three products of its parts
    would spill registers."""
    fits = SMALL < rows <= LARGE or rows > WIDEST_ALONE
    return LARGE if fits and precision == "tf32" else SMALL


def _tiles(size: int, tile: int) -> int:
    """Tiles on and below the diagonal."""
    return size // tile * (size // tile + 1) // 2


def _gram(x: torch.Tensor, parts: torch.Tensor, precision: str) -> None:
    blocks, rows, columns = x.shape
    splits, size = parts.shape[1:3]
    tile = _tile(size, precision)
    tiles = _tiles(size, tile)
    share = triton.cdiv(triton.cdiv(columns, splits), 64) * 64
    aligned = tile == SMALL or any(stride % 16 == 0 for stride in x.stride()[1:])
    depth = 128 // x.element_size() if aligned else 32  # element by element, registers are short
    _gram_kernel[(tiles, splits, blocks)](
        x, parts, *x.stride(), rows, columns, size, share, ONE_TILE=tiles == 1, TILE=tile,
        DEPTH=depth, PRECISION=precision, num_warps=8,
    )  # fmt: skip


def _apply(
    q: torch.Tensor, x: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor,
    update: Update | None, precision: str,
) -> None:  # fmt: skip
    blocks, rows, columns = x.shape
    change = update or Update(0.0, None, 0.0, 0.0)
    tile = _tile(q.shape[1], precision)
    grid = (triton.cdiv(columns, COLUMNS), triton.cdiv(rows, tile), blocks)
    _apply_kernel[grid](
        q, x, q if scale is None else scale, out,
        q if change.lr_tensor is None else change.lr_tensor, *x.stride(), *out.stride(), rows,
        columns, q.shape[1], change.lr, change.decay, change.factor, SCALED=scale is not None,
        UPDATE=update is not None, LR_IN_MEMORY=change.lr_tensor is not None, TILE=tile, DEPTH=32,
        COLUMNS=COLUMNS, PRECISION=precision, num_warps=8,
    )  # fmt: skip
