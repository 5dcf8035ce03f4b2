"""Pieces that the attention kernels share: rows of tensors, packed sequences, dropout, tile sizes.

Dropout draws Philox 4x32-10 words. The key is the 64-bit seed; the counter is

    c0 = 8 (row // 16) + row % 8      c2 = plane = (batch or sequence) * heads + head
    c1 = 8 (column // 16) + column % 8      c3 = 0

and entry (row, column) takes word 2 ((row // 8) % 2) + (column // 8) % 2 of the four. Rows and
columns count within their sequence. An entry is kept where its word is >= round(2^32 dropout). The
order makes one call serve four entries that one thread owns, in a tile and in its transpose.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels.devices import has_warpgroups
from minitriton.kernels.philox import philox_words, threshold_of

LOG2E = tl.constexpr(1.4426950408889634)
PRECISIONS = ("tf32", "tf32x3", "ieee")
UNSPECIALIZED = (  # their values change no code
    "q_batch", "q_token", "q_head", "k_batch", "k_token", "k_head", "rest_batch", "rest_token",
    "rest_head", "v_batch", "v_token", "v_head", "tokens", "keys", "heads", "share", "sequences",
    "threshold",
)  # fmt: skip


@triton.jit
def load_tile(
    ptr, stride, first, limit, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Rows first .. first + ROWS of a matrix, zeros from column WIDTH and, if MASKED, row limit."""
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    at = ptr + tl.to_tensor(first).to(tl.int64) * stride + (row * stride + column)
    mask = row < limit - first if MASKED else row >= 0
    if WIDTH < BLOCK:
        tile = tl.load(at, mask=mask & (column < WIDTH), other=0.0)
    elif MASKED:
        tile = tl.load(at, mask=mask & (column >= 0), other=0.0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit
def store_tile(
    ptr, stride, first, limit, tile, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    at = ptr + tl.to_tensor(first).to(tl.int64) * stride + (row * stride + column)
    mask = (first + row < limit) & (column < WIDTH)
    tl.store(at, tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def locate(tile, cu_ptr, sequences, queries, keys, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """What a program works on: its batch, its sequence, the first row of its tile there, the
    sequence's first token, and how many queries and keys there are.

    The tiles of packed sequence i have the numbers from cu[i] // BLOCK + i on, which leaves room
    for all of them (and for one or none that stays empty): no table and no look from the host.
    """
    if PACKED:
        low, high = 0, sequences
        while high - low > 1:
            middle = (low + high) // 2
            at_or_before = tl.load(cu_ptr + middle) // BLOCK + middle <= tile
            low = tl.where(at_or_before, middle, low)
            high = tl.where(at_or_before, high, middle)
        begin = tl.load(cu_ptr + low)
        rows = tl.minimum(tl.load(cu_ptr + low + 1), queries) - begin
        return 0, low, (tile - begin // BLOCK - low) * BLOCK, begin, rows, rows
    else:
        batch = tl.program_id(2)
        return batch, batch, tile * BLOCK, 0, queries, keys


@triton.jit
def kept(
    seed, plane, first_row, first_column, threshold, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Which entries of a tile dropout keeps; [COLUMNS, ROWS] if TRANSPOSED."""
    row = (first_row // 2 + tl.arange(0, ROWS // 2))[:, None]
    column = (first_column // 2 + tl.arange(0, COLUMNS // 2))[None, :]
    zero = tl.zeros([ROWS // 2, COLUMNS // 2], tl.int32)
    w0, w1, w2, w3 = tl.philox(seed, zero + row, zero + column, zero + plane, zero)
    limit = threshold.to(tl.uint32)
    upper = tl.join((w0 >= limit).to(tl.int8), (w1 >= limit).to(tl.int8))
    lower = tl.join((w2 >= limit).to(tl.int8), (w3 >= limit).to(tl.int8))
    words = tl.join(upper, lower)
    parts = tl.reshape(words, [ROWS // 16, 8, COLUMNS // 16, 8, 2, 2])
    if TRANSPOSED:
        tile = tl.reshape(tl.permute(parts, [2, 4, 3, 0, 5, 1]), [COLUMNS, ROWS])
    else:
        tile = tl.reshape(tl.permute(parts, [0, 5, 1, 2, 4, 3]), [ROWS, COLUMNS])
    return tile != 0


@triton.jit
def at_head(ptr, batch_stride, token_stride, head_stride, batch, token, head, ALIGN: tl.constexpr):
    """Where the rows of one head begin."""
    batch_stride = tl.multiple_of(batch_stride, ALIGN)
    head_stride = tl.multiple_of(head_stride, ALIGN)
    offset = tl.to_tensor(batch).to(tl.int64) * batch_stride
    offset += tl.to_tensor(token).to(tl.int64) * tl.multiple_of(token_stride, ALIGN)
    return ptr + offset + tl.to_tensor(head).to(tl.int64) * head_stride


def _up(channels: int, unit: int) -> int:
    return triton.cdiv(channels, unit) * unit


@dataclass(frozen=True)
class Plan:
    """What the kernels are specialised for; one constexpr argument, C.

    The channels of q and k fall into one or two power-of-two tiles: 192 = 128 + 64, 40 in 64.
    """

    QK: int  # channels of q and k
    V: int  # channels of v
    HEAD: int  # channels of the first tile
    TILE: int  # its size
    REST: int  # size of the tile of channels HEAD and up; 0: there are none
    V_TILE: int
    CAUSAL: bool
    PACKED: bool
    GATED: bool
    SHARED: bool  # the channels of k from HEAD on belong to all heads
    SHARE: int  # heads of q that share one of k and v; only the kernel for dk and dv knows it
    DROPOUT: bool
    PRECISION: str
    ALIGN: int  # elements in 16 bytes: divides all strides
    WARPGROUPS: bool  # 16-bit products run on wgmma, beside the threads
    PEELED: bool  # keys that not all queries see have a loop of their own there
    HELD: bool  # it loads q before its loops, for the compiler to keep in registers
    FOR_K: bool  # a launch of the kernel for dk and dv may make one of them alone
    FOR_V: bool
    BLOCK_M: int = 0
    BLOCK_N: int = 0
    APART: int = 1  # how far tokens of dq, dk and dv lie apart, in times their own size

    # Channels that tiles read: whole copies of 16 bytes, see `aligned`.

    @property
    def HEAD_READ(self) -> int:
        return _up(self.HEAD, self.ALIGN)

    @property
    def REST_READ(self) -> int:
        return _up(self.QK - self.HEAD, self.ALIGN)

    @property
    def V_READ(self) -> int:
        return _up(self.V, self.ALIGN)

    def __hash__(self) -> int:
        return hash(self._text)

    def cache_text(self) -> str:
        """The canonical text by which a constexpr enters a kernel's key."""
        return self._text

    @functools.cached_property
    def _text(self) -> str:
        return repr(self)


@functools.lru_cache(maxsize=1024)
def changed(plan: Plan, **fields: Any) -> Plan:
    """`plan` with other values of some fields; launches share it."""
    return dataclasses.replace(plan, **fields)


def channel_tile(channels: int) -> int:
    """The least tile that holds them and that a tensor core takes."""
    return max(16, triton.next_power_of_2(channels))


@functools.lru_cache(maxsize=1024)
def channel_tiles(qk: int, v: int, element_size: int) -> Mapping[str, int]:
    """The fields of a Plan that say how channels are tiled."""
    whole = channel_tile(qk)
    first = whole // 2
    rest = channel_tile(qk - first) if qk < whole else 0
    sizes = {"QK": qk, "V": v, "V_TILE": channel_tile(v)}
    if element_size == 4 and qk > 128:  # 256 in one product would need too many registers
        return {**sizes, "HEAD": 128, "TILE": 128, "REST": channel_tile(qk - 128)}
    if first < 16 or rest in (0, first):
        return {**sizes, "HEAD": qk, "TILE": whole, "REST": 0}
    return {**sizes, "HEAD": first, "TILE": first, "REST": rest}


@triton.jit
def visible_keys(first, queries, keys, C: tl.constexpr):
    """Tiles of keys before the first number are seen by all queries, none from the second on."""
    full, end = keys, keys
    if C.CAUSAL:  # the last query sees the last key
        end = tl.maximum(0, tl.minimum(keys, first + C.BLOCK_M + keys - queries))
        full = tl.maximum(0, tl.minimum(keys, first + 1 + keys - queries))
    return full // C.BLOCK_N * C.BLOCK_N, end


def strides_of(x: torch.Tensor) -> tuple[int, ...]:
    """Strides of all dimensions but the last; 0 where there is but one element."""
    strides, sizes = x.stride()[:-1], x.shape[:-1]
    if 1 not in sizes:
        return strides
    return tuple([s if n > 1 else 0 for s, n in zip(strides, sizes, strict=True)])


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x with dense rows of whole 16-byte groups, as asynchronous copies want them: itself where its
    shape and strides allow it, else a copy with zeros behind each row."""
    unit = 16 // x.element_size()
    *outer, last = x.stride()
    if last == 1 and x.data_ptr() % 16 == 0:
        width = x.shape[-1]
        if math.gcd(width, *outer) % unit == 0 or math.gcd(width, *strides_of(x)) % unit == 0:
            return x
    shape = (*x.shape[:-1], _up(x.shape[-1], unit))
    return torch.zeros(shape, dtype=x.dtype, device=x.device)[..., : x.shape[-1]].copy_(x)


class Operands(NamedTuple):
    """What all kernels read. q: [B, T, H, D], k, v: [B, T, H / share, D], `aligned`, not empty;
    rest: the channels of k from plan.HEAD on, seen alike, k itself where there are none."""

    q: torch.Tensor
    k: torch.Tensor
    rest: torch.Tensor
    v: torch.Tensor
    gate: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    seed: torch.Tensor | None
    scale: float
    dropout: float

    @property
    def share(self) -> int:
        """Heads of q to a head of k and v."""
        return self.q.shape[2] // self.k.shape[2]

    def plan(self, causal: bool, shared: bool, precision: str) -> Plan:
        q, size = self.q, self.q.element_size()
        return _plan(
            q.shape[3], self.v.shape[3], (self.k.shape[3], self.rest.shape[3]) if shared else None,
            size, causal, self.gate is not None, self.cu_seqlens is not None, self.dropout > 0,
            precision, size == 2 and has_warpgroups(q.device),
        )  # fmt: skip

    def lists(self) -> tuple[torch.Tensor, torch.Tensor]:
        """cu_seqlens and seed, with something in place of what is absent."""
        cu = self.q if self.cu_seqlens is None else self.cu_seqlens
        return cu, self.q if self.seed is None else self.seed

    def strides(self) -> tuple[int, ...]:
        q, k, rest, v = map(strides_of, (self.q, self.k, self.rest, self.v))
        return (*q, *k, *rest, *v)

    def numbers(self) -> tuple[float, ...]:
        """The kernels' parameters from `tokens` to `kept_scale`."""
        sequences = 0 if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
        return (
            self.q.shape[1], self.k.shape[1], self.q.shape[2], self.share, sequences,
            threshold_of(self.dropout), self.scale * LOG2E.value, 1 / (1 - self.dropout),
        )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _plan(
    qk: int, v: int, shared: tuple[int, int] | None, size: int, causal: bool, gated: bool,
    packed: bool, dropout: bool, precision: str, warpgroups: bool,
) -> Plan:  # fmt: skip
    """shared: channels of k of each head, and of all heads; size: bytes of an element."""
    sizes = dict(channel_tiles(qk, v, size))
    if shared is not None:
        head, rest = shared
        sizes |= {"HEAD": head, "TILE": channel_tile(head), "REST": channel_tile(rest)}
    return Plan(
        **sizes, CAUSAL=causal, GATED=gated, PACKED=packed, SHARED=shared is not None,
        SHARE=1, DROPOUT=dropout, PRECISION=precision, ALIGN=16 // size,
        WARPGROUPS=warpgroups, PEELED=False, HELD=False, FOR_K=True, FOR_V=True,
    )  # fmt: skip


def tiles_of(queries: int, block: int, cu_seqlens: torch.Tensor | None) -> int:
    """Grid size along the rows; see `locate`."""
    if cu_seqlens is None:
        return triton.cdiv(queries, block)
    return queries // block + cu_seqlens.shape[0] - 1


def attention_dropout_mask(
    seed: int | torch.Tensor, shape: tuple[int, int, int, int], dropout: float
) -> torch.Tensor:
    """Truth values [batch, heads, queries, keys]: what `attention` with this seed keeps.

    Plain torch twin of the kernels' Philox, whose counters stand at the top of this file. For
    packed sequences the first dimension counts sequences; rows and columns of each start at 0. The
    result is on the device of a seed that is a tensor, else on the CPU.
    """
    batch, heads, queries, keys = shape
    device = seed.device if isinstance(seed, torch.Tensor) else torch.device("cpu")
    row = torch.arange(queries, device=device)[:, None]
    column = torch.arange(keys, device=device)[None, :]
    plane = torch.arange(batch * heads, device=device)[:, None, None]
    words = philox_words(
        seed, [8 * (row // 16) + row % 8, 8 * (column // 16) + column % 8, plane, plane * 0]
    )
    index = 2 * (row // 8 % 2) + column // 8 % 2
    chosen = torch.gather(words, 0, index.expand(1, batch * heads, queries, keys))[0]
    return (chosen >= threshold_of(dropout)).view(shape)
