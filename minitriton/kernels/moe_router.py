"""Router of a mixture of experts: top k experts per token and the rows sorted by expert.

    s = sigmoid(logits)    T = top k of s + bias    p = scale * s_T / (sum s_T + 1e-20)

Source: Kimi K3 technical report, section 2.3. Three kernels and one fill with zeros; nothing waits
for the host and shapes depend on shapes only, so that a CUDA graph can hold them.

Select: a warp per token. Bisection over the bits of s + bias finds a threshold that between k + 1
and CANDIDATES experts pass (few steps, as any such threshold will do), and these are sorted by
counting who is greater, or equal and before. Each choice sets the
token's bit in a word per expert and BAND = 32 tokens.
Scan: bits counted and summed over bands per expert; the last program to finish sums over experts.
Place: a slot's row is its expert's offset, plus the sum of the bands before, plus the bits below
its own. All of it is integers, and no order of atomics shows in the result.
"""

from __future__ import annotations

from typing import Any

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels import checks
from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.moe_routing import EPS, Routing, moe_route_reference, padded_rows
from minitriton.kernels.operator import operator
from minitriton.kernels.rows import dense, new_like

__all__ = ["Routing", "moe_route", "moe_route_reference", "padded_rows"]

MOST_EXPERTS, MOST_CHOSEN = 1024, 32
LOWEST: tl.constexpr = tl.constexpr(-(2**31))
HIGHEST: tl.constexpr = tl.constexpr(2**31 - 1)
BAND: tl.constexpr = tl.constexpr(32)  # tokens that share a word of bits
PLACED = 1024  # slots and rows per program


@triton.jit
def sort_key(x):
    """int32 in the order of fp32: both zeros equal, NaN above infinity."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of_key(key):
    """The fp32 number of a sort_key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def mean_key(low, high):
    """The mean rounded up, without overflow."""
    return (low | high) - ((low ^ high) >> 1)


@triton.jit
def threshold(key, count, wanted, low, high, most):
    """A key that at least `wanted` of `count` reach, and at most `most` unless ties forbid."""
    while (count > most) & (low < high):
        middle = mean_key(low, high)
        reached = tl.sum((key >= middle).to(tl.int32))
        if reached >= wanted:
            low = middle
            count = reached
        else:
            high = middle - 1
    return low, count


@triton.jit
def _candidates(key, at, low, scratch_ptr, CANDIDATES: tl.constexpr):
    """Writes index and key of those above `low`, then equal to it, each in order of index."""
    mark = tl.where(key > low, 1, tl.where(key == low, 65536, 0))
    seen = tl.cumsum(mark, 0)
    above = tl.max(seen) & 65535
    position = tl.where(key > low, seen & 65535, above + (seen >> 16)) - 1
    mask = (key >= low) & (position < CANDIDATES)
    tl.store(scratch_ptr + position, at, mask=mask)
    tl.store(scratch_ptr + CANDIDATES + position, key, mask=mask)
    tl.debug_barrier()


@triton.jit
def _select_kernel(
    x_ptr, bias_ptr, scratch_ptr, experts_ptr, weights_ptr, cutoff_ptr, members_ptr, row_stride,
    experts, topk, scale, eps, SIGMOID: tl.constexpr, BIASED: tl.constexpr,
    CANDIDATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    x_ptr += token * row_stride
    scratch_ptr += token * (2 * CANDIDATES)
    at = tl.arange(0, BLOCK)
    score = tl.load(x_ptr + at, mask=at < experts, other=0.0).to(tl.float32)
    if SIGMOID:
        score = tl.sigmoid(score)
    if BIASED:
        score += tl.load(bias_ptr + at, mask=at < experts, other=0.0)
    key = tl.where(at < experts, sort_key(score), LOWEST)
    least = tl.min(tl.where(at < experts, key, HIGHEST))
    wanted = tl.minimum(topk + 1, experts)
    low, count = threshold(key, experts, wanted, least, tl.max(key), CANDIDATES)
    _candidates(key, at, low, scratch_ptr, CANDIDATES)

    lane = tl.arange(0, CANDIDATES)
    expert = tl.load(scratch_ptr + lane, mask=lane < count, other=0)
    key = tl.load(scratch_ptr + CANDIDATES + lane, mask=lane < count, other=LOWEST)
    rank = tl.where(lane < count, 0, CANDIDATES)
    for i in tl.range(tl.minimum(count, CANDIDATES), loop_unroll_factor=4):
        rival = tl.load(scratch_ptr + CANDIDATES + i)
        rank += ((rival > key) | ((rival == key) & (i < lane))).to(tl.int32)
    chosen = rank < topk
    picked = tl.load(x_ptr + expert, mask=chosen, other=0.0).to(tl.float32)
    if SIGMOID:
        picked = tl.sigmoid(picked)
    total = tl.sum(tl.where(chosen, picked, 0.0)) + eps
    slot = token * topk + rank
    tl.store(experts_ptr + slot, expert, mask=chosen)
    tl.store(weights_ptr + slot, picked / total * scale, mask=chosen)
    none = sort_key(tl.full([], -float("inf"), tl.float32))
    last = tl.max(tl.where(rank == topk, key, none))
    tl.store(cutoff_ptr + token, value_of_key(last))
    bit = tl.full([CANDIDATES], 1, tl.int32) << (token % BAND).to(tl.int32)
    band_ptr = members_ptr + token // BAND * experts
    tl.atomic_or(band_ptr + expert, bit, mask=chosen, sem="relaxed")


@triton.jit
def _ones(word):
    """Number of bits set in an int32."""
    x = word.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    return ((((x + (x >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _scan_kernel(
    members_ptr, before_ptr, counts_ptr, offsets_ptr, finished_ptr, bands, experts, tile_rows,
    BANDS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    total = tl.zeros([EXPERTS], tl.int32)
    for first in tl.range(0, bands, BANDS):
        band = first + tl.arange(0, BANDS)
        where = band.to(tl.int64)[:, None] * experts + expert[None, :]
        mask = (band < bands)[:, None] & (expert < experts)[None, :]
        ones = _ones(tl.load(members_ptr + where, mask=mask, other=0))
        before = tl.cumsum(ones, 0) - ones + total[None, :]
        tl.store(before_ptr + where, before, mask=mask)
        total += tl.sum(ones, axis=0)
    tl.store(counts_ptr + expert, total, mask=expert < experts)
    tl.debug_barrier()  # all counts of this program are written before it reports itself
    if tl.atomic_add(finished_ptr, 1) == tl.num_programs(0) - 1:
        at = tl.arange(0, BLOCK)
        counts = tl.load(counts_ptr + at, mask=at < experts, other=0)
        end = tl.cumsum(tl.cdiv(counts, tile_rows) * tile_rows, 0)
        tl.store(offsets_ptr, 0)
        tl.store(offsets_ptr + 1 + at, end, mask=at < experts)


@triton.jit
def _place_kernel(
    experts_ptr, members_ptr, before_ptr, counts_ptr, offsets_ptr, row_of_slot_ptr,
    token_of_row_ptr, expert_of_tile_ptr, slots, rows, experts, topk, levels,
    TILES: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0) * (TILES * TILE_ROWS) + tl.arange(0, TILES * TILE_ROWS)
    mask = slot < slots
    token = slot // topk
    expert = tl.load(experts_ptr + slot, mask=mask, other=0)
    where = (token // BAND).to(tl.int64) * experts + expert
    lower = (tl.full([TILES * TILE_ROWS], 1, tl.int32) << (token % BAND)) - 1
    row = tl.load(offsets_ptr + expert, mask=mask) + tl.load(before_ptr + where, mask=mask)
    row += _ones(tl.load(members_ptr + where, mask=mask) & lower)
    tl.store(row_of_slot_ptr + slot, row, mask=mask)
    tl.store(token_of_row_ptr + row, token, mask=mask)

    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    first = tile * TILE_ROWS
    owner = tl.zeros([TILES], tl.int32)  # the last expert whose offset is not above `first`
    for level in tl.range(levels):
        probe = owner + (1 << (levels - 1 - level))
        begin = tl.load(offsets_ptr + probe, mask=probe < experts, other=0)
        owner = tl.where((probe < experts) & (begin <= first), probe, owner)
    used = first < tl.load(offsets_ptr + experts)
    tl.store(expert_of_tile_ptr + tile, tl.where(used, owner, -1), mask=first < rows)
    end = tl.load(offsets_ptr + owner) + tl.load(counts_ptr + owner)
    end = tl.where(used, end, first)
    row = first[:, None] + tl.arange(0, TILE_ROWS)[None, :]
    nobody = tl.full([TILES, TILE_ROWS], -1, tl.int32)
    tl.store(token_of_row_ptr + row, nobody, mask=(row >= end[:, None]) & (row < rows))


@triton.jit
def _backward_kernel(
    grad_ptr, x_ptr, experts_ptr, dx_ptr, token_stride, slot_stride, row_stride, experts, topk,
    scale, eps, SIGMOID: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    dx_ptr += token * experts
    tl.store(dx_ptr + at, tl.zeros([BLOCK], dx_ptr.dtype.element_ty), mask=at < experts)
    tl.debug_barrier()
    j = tl.arange(0, SLOTS)
    expert = tl.load(experts_ptr + token * topk + j, mask=j < topk, other=0)
    picked = tl.load(x_ptr + token * row_stride + expert, mask=j < topk, other=0.0).to(tl.float32)
    if SIGMOID:
        picked = tl.where(j < topk, tl.sigmoid(picked), 0.0)
    grad_ptr += token * token_stride
    grad = tl.load(grad_ptr + j * slot_stride, mask=j < topk, other=0.0).to(tl.float32)
    total = tl.sum(picked) + eps
    dx = scale / total * (grad - tl.sum(grad * (picked / total)))
    if SIGMOID:
        dx = dx * picked * (1 - picked)
    tl.store(dx_ptr + expert, dx.to(dx_ptr.dtype.element_ty), mask=j < topk)


def moe_route(
    logits: torch.Tensor,
    bias: torch.Tensor | None = None,
    topk: int = 16,
    *,
    input: str = "logits",
    tile_rows: int = 64,
    scale: float = 1.0,
) -> Routing:
    """Top k experts of each token with renormalised weights, and rows sorted by expert.

    logits: [T, E], T >= 0 tokens and 1 <= E <= 1024 experts, fp32, bf16 or fp16; rows at any one
    distance (a slice of columns) are read in place. input = "scores" takes them for s itself, which
    must not be negative. bias: [E] fp32, without a gradient, or None; it decides who is chosen and
    nothing else. topk: k <= min(E, 32). tile_rows: a power of two up to 1024, the alignment of each
    expert's rows. scale: the model's routed_scaling_factor.

    The result is a `Routing`, see there. Its weights are differentiable with respect to the logits.
    Equal inputs give equal bits. KernelArgumentError names the argument that does not fit.
    """
    check_matrix("logits", logits)
    if bias is not None:
        check_bias(bias, "logits", logits)
    if input not in ("logits", "scores"):
        raise KernelArgumentError(f"argument 'input': {input!r}; it must be 'logits' or 'scores'")
    experts = logits.shape[1]
    checks.whole("topk", topk, min(experts, MOST_CHOSEN))
    checks.whole("tile_rows", tile_rows, 1024)
    if tile_rows & (tile_rows - 1):
        raise KernelArgumentError(f"argument 'tile_rows': {tile_rows} is not a power of two")
    if padded_rows(logits.shape[0], experts, topk, tile_rows) >= 2**31:
        raise KernelArgumentError(
            f"argument 'logits': {logits.shape[0]} tokens with topk = {topk} pass 2^31 rows"
        )
    factor = checks.positive("scale", scale)
    weights, *rest = _route_op(logits, bias, topk, tile_rows, factor, input == "logits")
    return Routing(rest[0], weights, *rest[1:])


def check_matrix(name: str, value: object) -> torch.Tensor:
    """`value` if it is a float matrix with a column for each of up to 1024 experts."""
    x = checks.float_tensor(name, value)
    if x.dim() != 2 or not 1 <= x.shape[1] <= MOST_EXPERTS:
        raise KernelArgumentError(
            f"argument '{name}': shape {tuple(x.shape)}; it must be [T, E] with "
            f"1 <= E <= {MOST_EXPERTS}"
        )
    return x


def check_bias(bias: object, other_name: str, other: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """`bias` if it is an fp32 vector without a gradient, as long as that dimension of `other`."""
    tensor = checks.float_tensor("bias", bias)
    if tensor.shape != (other.shape[dim],):
        raise KernelArgumentError(
            f"argument 'bias': shape {tuple(tensor.shape)}; '{other_name}' of shape "
            f"{tuple(other.shape)} needs {(other.shape[dim],)}"
        )
    if tensor.dtype != torch.float32:
        raise KernelArgumentError(f"argument 'bias': dtype {tensor.dtype}; it must be float32")
    if tensor.device != other.device:
        raise KernelArgumentError(
            f"argument 'bias': device {tensor.device} differs from that of '{other_name}', "
            f"{other.device}"
        )
    checks.no_gradient("it only selects, so use .detach()", bias=tensor)
    return tensor


Fields = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor,
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor,
]  # fmt: skip


def _weights_first(out: Routing) -> Fields:
    """The operator's results: opcheck wants a float to sum into."""
    return out.weights, out.experts, *out[2:]


@operator("moe_route")
def _route_op(
    logits: torch.Tensor, bias: torch.Tensor | None, topk: int, tile_rows: int, scale: float,
    sigmoid: bool,
) -> Fields:  # fmt: skip
    out = _empty(logits, topk, tile_rows)
    members, finished = _select(logits, bias, topk, scale, sigmoid, out)
    _sort(members, finished, tile_rows, out)
    return _weights_first(out)


def _select(
    logits: torch.Tensor, bias: torch.Tensor | None, topk: int, scale: float, sigmoid: bool,
    out: Routing,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Fills experts, weights and cutoff; returns bits [bands, E] and a counter that is zero."""
    tokens, experts = logits.shape
    bands = triton.cdiv(tokens, BAND.value)
    room = torch.zeros(bands * experts + 1, dtype=torch.int32, device=logits.device)
    members = room[:-1].view(bands, experts)
    if tokens > 0:
        x = dense(logits)
        candidates = max(32, triton.next_power_of_2(2 * topk))
        scratch = torch.empty(tokens, 2 * candidates, dtype=torch.int32, device=x.device)
        _select_kernel[(tokens,)](
            x, x if bias is None else bias.contiguous(), scratch, out.experts, out.weights,
            out.cutoff, members, x.stride(0), experts, topk, scale, EPS, SIGMOID=sigmoid,
            BIASED=bias is not None, CANDIDATES=candidates,
            BLOCK=max(32, triton.next_power_of_2(experts)), num_warps=1,
        )  # fmt: skip
    return members, room[-1:]


def _sort(members: torch.Tensor, finished: torch.Tensor, tile_rows: int, out: Routing) -> None:
    """Fills everything else."""
    bands, experts = members.shape
    before = torch.empty_like(members)
    _scan_kernel[(triton.cdiv(experts, 32),)](
        members, before, out.counts, out.offsets, finished, bands, experts, tile_rows, BANDS=64,
        EXPERTS=32, BLOCK=max(32, triton.next_power_of_2(experts)), num_warps=4,
    )  # fmt: skip
    rows = out.token_of_row.shape[0]
    if rows > 0:
        _place_kernel[(triton.cdiv(rows, PLACED),)](
            out.experts, members, before, out.counts, out.offsets, out.row_of_slot,
            out.token_of_row, out.expert_of_tile, out.experts.numel(), rows, experts,
            out.experts.shape[1], experts.bit_length(), TILES=PLACED // tile_rows,
            TILE_ROWS=tile_rows, num_warps=4,
        )  # fmt: skip


@operator("moe_route_backward")
def _route_backward_op(
    grad: torch.Tensor, logits: torch.Tensor, chosen: torch.Tensor, scale: float, sigmoid: bool
) -> torch.Tensor:
    dx = new_like(logits)
    tokens, experts = dx.shape
    if tokens > 0:
        x = dense(logits)
        topk = chosen.shape[1]
        _backward_kernel[(tokens,)](
            grad, x, chosen, dx, grad.stride(0), grad.stride(1), x.stride(0), experts, topk, scale,
            EPS, SIGMOID=sigmoid, SLOTS=32, BLOCK=max(32, triton.next_power_of_2(experts)),
            num_warps=1,
        )  # fmt: skip
    return dx


def _empty(logits: torch.Tensor, topk: int, tile_rows: int) -> Routing:
    tokens, experts = logits.shape
    rows = padded_rows(tokens, experts, topk, tile_rows)

    def room(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    return Routing(
        experts=room(tokens, topk),
        weights=room(tokens, topk, dtype=torch.float32),
        cutoff=room(tokens, dtype=torch.float32),
        counts=room(experts),
        offsets=room(experts + 1),
        row_of_slot=room(tokens, topk),
        token_of_row=room(rows),
        expert_of_tile=room(rows // tile_rows),
    )


_route_op.register_fake(
    lambda logits, bias, topk, tile_rows, scale, sigmoid: _weights_first(
        _empty(logits, topk, tile_rows)
    )
)
_route_backward_op.register_fake(lambda grad, logits, chosen, scale, sigmoid: new_like(logits))


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    logits, _, _, _, ctx.scale, ctx.sigmoid = inputs
    ctx.save_for_backward(logits, output[1])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # no zeros for what has no gradient


def _differentiate(ctx: Any, grad: torch.Tensor | None, *others: Any) -> Any:
    if grad is None:
        return (None,) * 6
    dx = _route_backward_op(grad, *ctx.saved_tensors, ctx.scale, ctx.sigmoid)
    return dx, None, None, None, None, None


_route_op.register_autograd(_differentiate, setup_context=_save)
