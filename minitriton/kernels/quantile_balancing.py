"""Quantile balancing: the router's bias that gives every expert its share, exact or by histogram.

    alpha_i = (k+1)-th largest over experts of s_i + b         (the router's cutoff)
    b_j     <- -((q+1)-th largest over the m tokens of s_ij - alpha_i),    q = floor(m k / E)
    b       <- b - mean(b)

Source: Kimi K3 technical report, eqs. 13 and 14, and appendix D for the histogram: r = alpha - s
lies in [min b - 1, max b + 1] as s lies in [0, 1]; counts of r in uniform bins add up over
micro-batches and ranks; the bin where they reach m k / E is interpolated. One update is a step of
exact coordinate descent on the dual of the balanced assignment. A token whose cutoff is expert j
has the margin -b_j, so an expert within that many tokens of its share keeps its bias.

Counting is in integers: equal inputs give equal bits, whatever the order of the atomics.
"""

from __future__ import annotations

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels import checks
from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.moe_router import check_bias, check_matrix
from minitriton.kernels.operator import operator
from minitriton.kernels.quantile_selection import cutoffs, negated_quantiles
from minitriton.kernels.rows import dense

MOST_BINS = 16384
TOKENS = 16  # per program of the histogram


@triton.jit
def _range_of(bias_ptr, experts, BLOCK: tl.constexpr):
    """(lower end, width) of the range of r."""
    at = tl.arange(0, BLOCK)
    least = tl.min(tl.load(bias_ptr + at, mask=at < experts, other=float("inf")))
    most = tl.max(tl.load(bias_ptr + at, mask=at < experts, other=-float("inf")))
    return least - 1, most - least + 2


@triton.jit
def _histogram_kernel(
    scores_ptr, cutoff_ptr, bias_ptr, hist_ptr, row_stride, tokens, experts, bins,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, BLOCK)
    least, width = _range_of(bias_ptr, experts, BLOCK)
    first = tl.program_id(0) * TOKENS
    for token in tl.range(first, tl.minimum(first + TOKENS, tokens)):
        row_ptr = scores_ptr + token.to(tl.int64) * row_stride
        score = tl.load(row_ptr + expert, mask=expert < experts, other=0.0).to(tl.float32)
        r = tl.load(cutoff_ptr + token) - score
        place = ((r - least) / width * bins).to(tl.int32)
        place = tl.minimum(tl.maximum(place, 0), bins - 1)
        tl.atomic_add(hist_ptr + expert * bins + place, 1, mask=expert < experts, sem="relaxed")


@triton.jit
def _quantile_kernel(
    hist_ptr, bias_ptr, out_ptr, experts, bins, topk, BINS: tl.constexpr, BLOCK: tl.constexpr
):
    expert = tl.program_id(0)
    least, width = _range_of(bias_ptr, experts, BLOCK)
    at = tl.arange(0, BINS)
    count = tl.load(hist_ptr + expert * bins + at, mask=at < bins, other=0).to(tl.int64)
    seen = tl.cumsum(count, 0) * experts  # in units of 1 / E: the share is a whole number, too
    share = tl.sum(count) * topk
    short = (seen < share) & (at < bins)
    place = tl.sum(short.to(tl.int32))
    before = tl.max(tl.where(short, seen, 0))
    inside = tl.sum(tl.where(at == place, count, 0)) * experts
    part = (share - before).to(tl.float32) / tl.maximum(inside, 1).to(tl.float32)
    quantile = least + (place + part) * width / bins
    old = tl.load(bias_ptr + expert)
    tl.store(out_ptr + expert, tl.where(share > 0, quantile, old))


@triton.jit
def _centre_kernel(new_ptr, old_ptr, out_ptr, experts, ema, BLOCK: tl.constexpr):
    """new - mean(new), and of that and `old` the mean with weights 1 - ema and ema."""
    at = tl.arange(0, BLOCK)
    mask = at < experts
    new = tl.load(new_ptr + at, mask=mask, other=0.0)
    new -= tl.sum(new) / experts
    tl.store(out_ptr + at, new + ema * (tl.load(old_ptr + at, mask=mask) - new), mask=mask)


def quantile_bias(
    scores: torch.Tensor, bias: torch.Tensor, topk: int, cutoff: torch.Tensor | None = None
) -> torch.Tensor:
    """The exact new bias of one batch: [E] fp32, mean zero.

    scores: [m, E], the s of all m tokens, fp32, bf16 or fp16, E <= 1024; rows at any one distance
    are read in place. bias: [E] fp32, the one in use. topk: 1 <= k < E. cutoff: [m] fp32, the
    router's (`Routing.cutoff`); None computes it here. Without tokens the bias is
    only centred. No gradients: tensors that require one are refused. KernelArgumentError names the
    argument that does not fit.
    """
    x = _check(scores, bias, cutoff)
    _check_topk(topk, x.shape[1])
    return _quantile_bias_op(x, bias, topk, cutoff)


def quantile_histogram(
    scores: torch.Tensor, cutoff: torch.Tensor, bias: torch.Tensor, hist: torch.Tensor
) -> torch.Tensor:
    """Adds the counts of r = cutoff - scores to `hist`, in place, and returns it.

    scores: [m, E] in [0, 1], fp32, bf16 or fp16; cutoff: [m] fp32; bias: [E] fp32, the one that the
    cutoffs come from: bins are uniform on [min(bias) - 1, max(bias) + 1], and what lies outside
    counts in the first or last. hist: [E, bins] int32, contiguous, 2 <= bins <= 16384 (K3: 1000);
    zeros before the first micro-batch. Histograms of one bias may be added over ranks. No
    gradients: tensors that require one are refused. KernelArgumentError names the argument that
    does not fit.
    """
    x = _check(scores, bias, cutoff)
    _check_histogram(hist, x.shape[1], x.device)
    _histogram_op(x, cutoff, bias, hist)
    return hist


def quantile_bias_from_histogram(
    hist: torch.Tensor, bias: torch.Tensor, topk: int, ema: float = 0.0
) -> torch.Tensor:
    """The new bias, [E] fp32 with mean zero, from counts of `quantile_histogram`.

    hist: [E, bins] int32; bias: [E] fp32, the same as while counting; topk: 1 <= k < E. Tokens are
    counted from the histogram. Before centring the result is within a bin's width,
    (max(bias) - min(bias) + 2) / bins, of `quantile_bias` where margins are denser than bins.
    0 <= ema < 1 keeps that part of the old bias: ema * bias + (1 - ema) * new. An expert without
    counts keeps its bias up to the mean. KernelArgumentError names the argument that does not fit.
    """
    _check_histogram(hist)
    check_bias(bias, "hist", hist, dim=0)
    _check_topk(topk, hist.shape[0])
    return _from_histogram_op(hist, bias, topk, checks.fraction("ema", ema))


def quantile_bias_reference(
    scores: torch.Tensor, bias: torch.Tensor, topk: int, cutoff: torch.Tensor | None = None
) -> torch.Tensor:
    """`quantile_bias` in plain torch, in the dtype of its arguments, for m >= 1."""
    m, experts = scores.shape
    if cutoff is None:
        cutoff = (scores + bias).topk(topk + 1, -1).values[:, -1]
    margins = scores - cutoff[:, None]
    new = -margins.topk(m * topk // experts + 1, 0).values[-1]
    return new - new.mean()


def _check(scores: object, bias: object, cutoff: object) -> torch.Tensor:
    x = check_matrix("scores", scores)
    check_bias(bias, "scores", x)
    checks.no_gradient("use .detach()", scores=x, cutoff=cutoff)
    if cutoff is not None:
        alpha = checks.float_tensor("cutoff", cutoff)
        wanted = (x.shape[:1], torch.float32, x.device)
        if (alpha.shape, alpha.dtype, alpha.device) != wanted:
            raise KernelArgumentError(
                f"argument 'cutoff': {alpha.dtype} {tuple(alpha.shape)} on {alpha.device}; it must "
                f"be float32 {tuple(x.shape[:1])} on {x.device}"
            )
    return x


def _check_topk(topk: object, experts: int) -> None:
    if experts < 2:
        raise KernelArgumentError("argument 'bias': one expert cannot be balanced")
    checks.whole("topk", topk, experts - 1)


def _check_histogram(
    hist: object, experts: int | None = None, device: torch.device | None = None
) -> None:
    wanted = f"[{experts or 'E'}, bins] with 2 <= bins <= {MOST_BINS}"
    if not isinstance(hist, torch.Tensor) or hist.dtype != torch.int32:
        kind = hist.dtype if isinstance(hist, torch.Tensor) else type(hist).__name__
        raise KernelArgumentError(f"argument 'hist': {kind}; it must be an int32 tensor {wanted}")
    fits = hist.dim() == 2 and 2 <= hist.shape[1] <= MOST_BINS and hist.shape[0] > 0
    if not fits or hist.shape[0] != (experts or hist.shape[0]) or not hist.is_contiguous():
        raise KernelArgumentError(
            f"argument 'hist': shape {tuple(hist.shape)}, strides {hist.stride()}; it must be "
            f"{wanted}, contiguous"
        )
    if device is not None and hist.device != device:
        raise KernelArgumentError(
            f"argument 'hist': device {hist.device} differs from that of 'scores', {device}"
        )


def _block(experts: int) -> int:
    return max(128, triton.next_power_of_2(experts))


def _centred(new: torch.Tensor, old: torch.Tensor, ema: float = 0.0) -> torch.Tensor:
    out = torch.empty(new.shape, dtype=torch.float32, device=new.device)
    _centre_kernel[(1,)](
        new.contiguous(), old.contiguous(), out, new.numel(), ema, BLOCK=_block(new.numel())
    )
    return out


@operator("quantile_bias")
def _quantile_bias_op(
    scores: torch.Tensor, bias: torch.Tensor, topk: int, cutoff: torch.Tensor | None
) -> torch.Tensor:
    tokens, experts = scores.shape
    if tokens == 0:
        return _centred(bias, bias)
    x = dense(scores)
    alpha = cutoffs(x, bias.contiguous(), topk) if cutoff is None else cutoff.contiguous()
    new = negated_quantiles(x, alpha, tokens * topk // experts + 1)
    return _centred(new, bias)


@operator("quantile_histogram", mutates_args=("hist",))
def _histogram_op(
    scores: torch.Tensor, cutoff: torch.Tensor, bias: torch.Tensor, hist: torch.Tensor
) -> None:
    tokens, experts = scores.shape
    if tokens == 0:
        return
    x = dense(scores)
    _histogram_kernel[(triton.cdiv(tokens, TOKENS),)](
        x, cutoff.contiguous(), bias.contiguous(), hist, x.stride(0), tokens, experts,
        hist.shape[1], TOKENS=TOKENS, BLOCK=_block(experts), num_warps=4,
    )  # fmt: skip


@operator("quantile_bias_from_histogram")
def _from_histogram_op(
    hist: torch.Tensor, bias: torch.Tensor, topk: int, ema: float
) -> torch.Tensor:
    experts, bins = hist.shape
    new = torch.empty(experts, dtype=torch.float32, device=hist.device)
    _quantile_kernel[(experts,)](
        hist, bias.contiguous(), new, experts, bins, topk,
        BINS=max(128, triton.next_power_of_2(bins)), BLOCK=_block(experts), num_warps=4,
    )  # fmt: skip
    return _centred(new, bias, ema)


_quantile_bias_op.register_fake(lambda scores, bias, topk, cutoff: bias.new_empty(bias.shape))
_histogram_op.register_fake(lambda scores, cutoff, bias, hist: None)
_from_histogram_op.register_fake(lambda hist, bias, topk, ema: bias.new_empty(bias.shape))
