"""Decoding with multi-head latent attention: absorbed queries against the paged latent cache.

    s = scale * q . row      p = softmax(s)      out = p . row[:L]      row = [latent | shared]

All heads share the rows, and the values are the first L channels of the keys: a row is read once.
Source: Kimi K3 technical report, section 2.1.2 (L = 512, 64 shared channels, scale 1/sqrt(192));
pages of 64 tokens and the fp8 row are FlashMLA's (see mla_cache). Kernels: mla_decode_kernels.

Where B x row tiles do not fill the GPU, the pages of a sequence are dealt to several programs, and
a second kernel merges their results. Their number follows from shapes alone: nothing waits for the
host, and a CUDA graph can hold both.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

import minitriton as triton
from minitriton import options
from minitriton.kernels import checks
from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.mla_cache import (
    GROUP,
    PAGE,
    cache_parts,
    check_cache,
    mla_cache_dequantise,
)
from minitriton.kernels.mla_decode_kernels import combine_kernel, decode_kernel
from minitriton.kernels.operator import operator
from minitriton.kernels.rows import dense
from minitriton.runtime import driver

LOG2_E = 1.4426950408889634
MOST_QUERIES = 8  # new tokens of a sequence in one call
SMALLEST_SHARED = 101_376  # bytes per CTA on every GPU we compile for; what CPU tensors assume
RESERVED = 2048  # bytes of it for reductions
LEAST_PAGES = 2  # pages worth a split
MOST_SPLITS = 128


class Tiles(NamedTuple):
    """Of a program: query rows, tokens per step, latent channels per product, stages, warps."""

    rows: int
    tokens: int
    chunk: int
    stages: int
    warps: int


def mla_decode(
    q: torch.Tensor, cache: torch.Tensor, block_table: torch.Tensor, cache_lens: torch.Tensor, *,
    scale: float, causal: bool = True, return_lse: bool = False, num_splits: int | None = None,
    latent: int = 512, check: bool | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """softmax(scale q . row) . row[:latent] over the cached rows of each sequence.

    q: [B, n, H, W], 1 <= n <= 8 new tokens, any H >= 1, in fp32, bf16 or fp16; W = latent + shared
    channels (K3: 512 + 64; powers of two, at least 32 and 16). cache: [blocks, 64, W] in the
    dtype of q, or uint8 [blocks, 64, 656] (fp8 rows, q in bf16), contiguous rows; read in place.
    block_table: int32 [B, pages], the block of each page. cache_lens: int32 [B], tokens of each
    sequence in the cache, the n new ones included; 0 gives zeros and lse -inf. causal: query i
    sees the first len - (n - 1 - i) tokens; else all.

    Result: [B, n, H, latent], contiguous, dtype of q; with return_lse also lse [B, n, H] in fp32,
    natural logarithm. num_splits: programs per sequence and tile of rows, by default from the
    shapes. The result of one number of splits does not vary from run to run. No gradients.

    check: whether to compare the table and lengths with the cache before the launch, which waits
    for the device; by default for CPU tensors, and with MINITRITON_DEBUG=1. Unchecked, blocks are
    clamped to those there are and lengths to the table, so that nothing outside is read.
    KernelArgumentError names the argument that does not fit.
    """
    checks.no_gradient("train with mla_attention", q=q, cache=cache)
    query = checks.float_tensor("q", q)
    _check_query(query, latent)
    check_cache("cache", cache, latent, query.shape[3] - latent, query)
    _check_lists(query, cache, block_table, cache_lens)
    if num_splits is not None and (
        isinstance(num_splits, bool) or not isinstance(num_splits, int) or num_splits < 1
    ):
        raise KernelArgumentError(
            f"argument 'num_splits': must be a positive integer or None, got {num_splits!r}"
        )
    out, lse = _decode_op(
        query, cache, block_table, cache_lens, checks.positive("scale", scale), bool(causal),
        num_splits or 0, latent, check,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def mla_decode_reference(
    q: torch.Tensor, cache: torch.Tensor, block_table: torch.Tensor, cache_lens: torch.Tensor, *,
    scale: float, causal: bool = True, latent: int = 512,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out, lse) of `mla_decode` in plain torch, in the dtype of q; it waits for the device."""
    rows = mla_cache_dequantise(cache) if cache.dtype == torch.uint8 else cache
    batch, new, heads, _ = q.shape
    out = q.new_zeros(batch, new, heads, latent)
    lse = q.new_full((batch, new, heads), -float("inf"))
    for b, length in enumerate(cache_lens.tolist()):
        pages = block_table[b, : triton.cdiv(length, PAGE)].long()
        kept = rows[pages].flatten(0, 1)[:length].to(q.dtype)
        for i in range(new):
            visible = kept[: max(0, length - (new - 1 - i) * causal)]
            if len(visible):
                scores = q[b, i] @ visible.T * scale
                out[b, i] = torch.softmax(scores, -1) @ visible[:, :latent]
                lse[b, i] = torch.logsumexp(scores, -1)
    return out, lse


def _check_query(q: torch.Tensor, latent: object) -> None:
    if not isinstance(latent, int) or latent < 32 or latent & (latent - 1):
        raise KernelArgumentError(
            f"argument 'latent': must be a power of two of at least 32, got {latent!r}"
        )
    shape = tuple(q.shape)
    if q.dim() != 4 or not 1 <= shape[1] <= MOST_QUERIES or shape[2] < 1:
        raise KernelArgumentError(
            f"argument 'q': shape {shape}; it must be [B, n, H, W] with 1 <= n <= {MOST_QUERIES} "
            "and H >= 1"
        )
    shared = shape[3] - latent
    if shared < 16 or shared & (shared - 1):
        raise KernelArgumentError(
            f"argument 'q': {shape[3]} channels; after the {latent} of the latent there must be a "
            "power of two of at least 16"
        )
    if shape[0] > 65535:
        raise KernelArgumentError(f"argument 'q': {shape[0]} sequences; at most 65535 in one call")


def _check_lists(
    q: torch.Tensor, cache: torch.Tensor, block_table: object, cache_lens: object
) -> None:
    for name, value, rank in (("block_table", block_table, 2), ("cache_lens", cache_lens, 1)):
        if not isinstance(value, torch.Tensor) or value.dtype != torch.int32:
            found = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
            raise KernelArgumentError(f"argument '{name}': must be an int32 tensor, got {found}")
        if value.dim() != rank or value.shape[0] != q.shape[0]:
            raise KernelArgumentError(
                f"argument '{name}': shape {tuple(value.shape)}; it must be "
                f"[{q.shape[0]}{', pages' if rank == 2 else ''}] for 'q' of shape {tuple(q.shape)}"
            )
        if value.device != q.device:
            raise KernelArgumentError(
                f"argument '{name}': device {value.device} differs from that of 'q', {q.device}"
            )


def _check_contents(cache: torch.Tensor, table: torch.Tensor, lens: torch.Tensor) -> None:
    """Every page that a length reaches is a block of the cache; waits for the device."""
    most = table.shape[1] * PAGE
    if bool(((lens < 0) | (lens > most)).any()):
        raise KernelArgumentError(
            f"argument 'cache_lens': values from {int(lens.min())} to {int(lens.max())}; a table "
            f"of {table.shape[1]} pages holds 0 to {most} tokens"
        )
    used = torch.arange(table.shape[1], device=table.device) * PAGE < lens[:, None]
    wrong = used & ((table < 0) | (table >= cache.shape[0]))
    if bool(wrong.any()):
        sequence, page = wrong.nonzero()[0].tolist()
        raise KernelArgumentError(
            f"argument 'block_table': block {int(table[sequence, page])} at [{sequence}, {page}]; "
            f"'cache' has blocks 0 to {cache.shape[0] - 1}"
        )


@functools.cache
def _device(index: int | None) -> tuple[int, int]:
    """(SMs, bytes of shared memory a CTA may have); one SM for CPU tensors."""
    if index is None:
        return 1, SMALLEST_SHARED
    found = driver.properties(index)
    return torch.cuda.get_device_properties(index).multi_processor_count, found.max_shared


def choose_tiles(rows: int, latent: int, shared: int, kind: torch.dtype, memory: int) -> Tiles:
    """Tiles for `rows` query rows (new tokens x heads) that fit `memory` bytes of shared memory.

    `kind` is the cache's dtype. More rows per tile read the cache less often from L2, more tokens
    per step read the queries less often from shared memory; registers and CTAs per SM bound both.
    """
    if kind == torch.float32:
        return Tiles(16, 8, latent // 4, 2, 4)
    fp8 = kind == torch.uint8
    if rows <= 16:
        return Tiles(16, 32, GROUP, 3, 4) if fp8 else Tiles(16, 32, latent // 2, 2, 4)
    if fp8:
        small = memory <= SMALLEST_SHARED
        return Tiles(32, 16, GROUP, 3, 8) if small else Tiles(32, 64, GROUP, 2, 8)
    row = 2 * (latent + shared)
    for tokens in (64, 32):  # 32 rows: on an H200 faster than 64 with 96 heads, and none is padding
        stages = (memory - 64 * tokens - RESERVED - 32 * row) // (tokens * row)
        if stages >= 2:
            return Tiles(32, tokens, latent // 2, min(stages, 4), 8)
    return Tiles(32, 16, latent // 2, 3, 8)


def choose_splits(programs: int, pages: int, slots: int) -> int:
    """Splits with which `programs` per split fill `slots` places best, most work for each first."""
    most = max(1, min(pages // LEAST_PAGES, MOST_SPLITS, triton.cdiv(2 * slots, programs)))
    # waves of programs, each as long as its pages, and two pages' worth of set-up and merge
    cost = {
        n: triton.cdiv(programs * n, slots) * (triton.cdiv(pages, n) + 2 * (n > 1))
        for n in range(1, most + 1)
    }
    return min(cost, key=lambda n: (cost[n], n))


@operator("mla_decode")
def _decode_op(
    q: torch.Tensor, cache: torch.Tensor, block_table: torch.Tensor, cache_lens: torch.Tensor,
    scale: float, causal: bool, num_splits: int, latent: int, check: bool | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    if check or (check is None and (not q.is_cuda or options.read().debug)):
        _check_contents(cache, block_table, cache_lens)
    out, lse = _empty_outputs(q, latent)
    if out.numel() == 0:
        return out, lse
    if cache.shape[0] == 0 or block_table.shape[1] == 0:
        return out.zero_(), lse.fill_(-float("inf"))
    rows, batch = q.shape[1] * q.shape[2], q.shape[0]
    sms, memory = _device(q.get_device() if q.is_cuda else None)
    tiles = choose_tiles(rows, latent, q.shape[3] - latent, cache.dtype, memory)
    each = triton.cdiv(rows, tiles.rows)
    per_sm = 8 // tiles.warps
    pages = block_table.shape[1]
    splits = min(num_splits, pages) or choose_splits(batch * each, pages, sms * per_sm)
    partial, partial_lse = out, lse
    if splits > 1:
        partial = torch.empty((splits, *out.shape), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty((splits, *lse.shape), dtype=torch.float32, device=q.device)
    parts = cache_parts(cache, latent)
    table, lens = dense(block_table), cache_lens.contiguous()
    decode_kernel[(each, splits, batch)](
        q.contiguous(), *parts, table, lens, partial, partial_lse, scale * LOG2_E,
        *(part.stride(0) for part in parts), table.stride(0), cache.shape[0], pages, q.shape[2],
        rows, splits, *(part.stride(1) for part in parts), LATENT=latent,
        SHARED=q.shape[3] - latent, PAGE=PAGE, ROWS=tiles.rows, TOKENS=tiles.tokens,
        CHUNK=tiles.chunk, CAUSAL=causal and q.shape[1] > 1, FP8=cache.dtype == torch.uint8,
        PRECISION="tf32x3", num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if splits > 1:
        combine_kernel[(batch * rows,)](
            partial, partial_lse, lens, out, lse, pages, rows, splits, LATENT=latent,
            SPLITS=max(32, triton.next_power_of_2(splits)), PAGE=PAGE, num_warps=1,
        )  # fmt: skip
    return out, lse


def _empty_outputs(q: torch.Tensor, latent: int) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty(*q.shape[:3], latent, dtype=q.dtype, device=q.device)
    return out, torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


_decode_op.register_fake(
    lambda q, cache, table, lens, scale, causal, splits, latent, check: _empty_outputs(q, latent)
)
