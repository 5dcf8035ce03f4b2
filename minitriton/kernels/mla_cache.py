"""The paged cache of multi-head latent attention: its rows, and the kernel that writes them.

    row = [ RMSNorm(latent) * weight | rotate(shared) ]     each step if asked for (K3: no rotation)

A cache is [blocks, 64, L + R] in fp32, bf16 or fp16, a row being L latent and R shared channels
(512 and 64 in K3), or uint8 [blocks, 64, 656] in FlashMLA's fp8 format: 512 e4m3 numbers, 4 fp32
scales (one for each 128 of them) and 64 bf16 channels that are not quantised.

Source: Kimi K3 technical report, section 2.1.2 (gated MLA); FlashMLA for the fp8 row. One kernel
normalises, rotates, quantises and inserts; slots, not the host, say where.
"""

from __future__ import annotations

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels import checks
from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.operator import operator
from minitriton.kernels.rows import dense

PAGE = 64  # tokens of a block
GROUP = 128  # latent channels that share a scale in an fp8 row
FP8_LATENT, FP8_SHARED = 512, 64
FP8_ROW = FP8_LATENT + 4 * (FP8_LATENT // GROUP) + 2 * FP8_SHARED  # bytes
LARGEST = 448.0  # of e4m3

Rope = tuple[torch.Tensor, torch.Tensor]


@triton.jit
def rotate(first, second, cos, sin):
    """The pair turned by an angle."""
    return first * cos - second * sin, second * cos + first * sin


@triton.jit(do_not_specialize=["blocks"])
def _write_kernel(
    latent_ptr, shared_ptr, slots_ptr, weight_ptr, cos_ptr, sin_ptr, to_latent_ptr, to_scale_ptr,
    to_shared_ptr, latent_stride, shared_stride, table_stride, blocks, latent_block, latent_row,
    scale_block, scale_row, shared_block, shared_row, eps,
    LATENT: tl.constexpr, SHARED: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr,
    FP8: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if (slot < 0) | (slot >= blocks.to(tl.int64) * PAGE):
        return
    block, row = slot // PAGE, slot % PAGE
    at = tl.arange(0, LATENT)
    latent = tl.load(latent_ptr + token * latent_stride + at).to(tl.float32)
    if NORM:
        latent *= tl.rsqrt(tl.sum(latent * latent) / LATENT + eps)
        latent *= tl.load(weight_ptr + at).to(tl.float32)
    to = to_latent_ptr + block * latent_block + row * latent_row + at
    if FP8:
        groups = tl.reshape(latent, [LATENT // GROUP, GROUP])
        largest = tl.max(tl.abs(groups), 1)
        scale = tl.where(largest > 0, largest / 448.0, 1.0)
        latent = tl.reshape(groups / scale[:, None], [LATENT])
        tl.store(
            to_scale_ptr + block * scale_block + row * scale_row + tl.arange(0, LATENT // GROUP),
            scale,
        )
    tl.store(to, latent.to(to_latent_ptr.dtype.element_ty))
    half = tl.arange(0, SHARED // 2)
    shared_ptr += token * shared_stride
    to_shared_ptr += block * shared_block + row * shared_row
    first = tl.load(shared_ptr + half)
    second = tl.load(shared_ptr + SHARED // 2 + half)
    if ROPE:
        cos = tl.load(cos_ptr + token * table_stride + half).to(tl.float32)
        sin = tl.load(sin_ptr + token * table_stride + half).to(tl.float32)
        first, second = rotate(first.to(tl.float32), second.to(tl.float32), cos, sin)
    element = to_shared_ptr.dtype.element_ty
    tl.store(to_shared_ptr + half, first.to(element))
    tl.store(to_shared_ptr + SHARED // 2 + half, second.to(element))


def mla_cache_write(
    cache: torch.Tensor, latent: torch.Tensor, shared: torch.Tensor, slots: torch.Tensor, *,
    norm_weight: torch.Tensor | None = None, eps: float = 1e-6, rope: Rope | None = None,
) -> None:  # fmt: skip
    """Writes T rows into the paged cache in place; see the module for what a row is.

    cache: [blocks, 64, L + R] in the dtype of `latent`, or uint8 [blocks, 64, 656] (then L = 512,
    R = 64 and `latent` is bf16), with contiguous rows. latent: [T, L]; shared: [T, R]; L and R are
    powers of two, L >= 32, R >= 16. slots: int32 or int64 [T], block * 64 + row; -1, or any slot
    outside the cache, writes nothing. Two tokens in one slot: either may win. norm_weight: [L],
    float; if given, `latent` goes through an RMS norm with `eps`. rope: (cos, sin), each fp32
    [T, R / 2]; if given, channels i and i + R / 2 of `shared` are turned by the token's angle i.
    No gradients. KernelArgumentError names the argument that does not fit.
    """
    checks.no_gradient(
        "train with mla_attention", cache=cache, latent=latent, shared=shared,
        norm_weight=norm_weight, rope=rope,
    )  # fmt: skip
    check_rows(latent, shared)
    check_cache("cache", cache, latent.shape[1], shared.shape[1], latent)
    if not isinstance(slots, torch.Tensor) or slots.dtype not in (torch.int32, torch.int64):
        raise KernelArgumentError("argument 'slots': must be an int32 or int64 tensor")
    if slots.shape != latent.shape[:1] or slots.device != latent.device:
        raise KernelArgumentError(
            f"argument 'slots': shape {tuple(slots.shape)} on {slots.device}; it must be "
            f"{tuple(latent.shape[:1])} on {latent.device}, one for each row of 'latent'"
        )
    if norm_weight is not None:
        checks.vector("norm_weight", norm_weight, "latent", latent)
    angles = check_rope(rope, shared)
    eps = checks.positive("eps", eps)
    _write_op(cache, latent, shared, slots, norm_weight, eps, *angles)


def mla_cache_write_reference(
    cache: torch.Tensor, latent: torch.Tensor, shared: torch.Tensor, slots: torch.Tensor, *,
    norm_weight: torch.Tensor | None = None, eps: float = 1e-6, rope: Rope | None = None,
) -> None:  # fmt: skip
    """`mla_cache_write` in plain torch; it waits for the device."""
    latent = latent.float() if latent.dtype != torch.float64 else latent
    if norm_weight is not None:
        scale = torch.rsqrt(latent.square().mean(-1, keepdim=True) + eps)
        latent = latent * scale * norm_weight
    shared = rotate_reference(shared, rope)
    for token, slot in enumerate(slots.tolist()):
        if not 0 <= slot < cache.shape[0] * PAGE:
            continue
        row = cache[slot // PAGE, slot % PAGE]
        if cache.dtype != torch.uint8:
            row.copy_(torch.cat([latent[token].to(row.dtype), shared[token].to(row.dtype)]))
            continue
        groups = latent[token].view(-1, GROUP)
        largest = groups.abs().amax(-1)
        scales = torch.where(largest > 0, largest / LARGEST, 1.0)
        numbers = (groups / scales[:, None]).to(torch.float8_e4m3fn)
        row.copy_(
            torch.cat([
                numbers.flatten().view(torch.uint8), scales.float().view(torch.uint8),
                shared[token].bfloat16().view(torch.uint8),
            ])
        )  # fmt: skip


def mla_cache_dequantise(cache: torch.Tensor) -> torch.Tensor:
    """An fp8 cache [blocks, 64, 656] as fp32 [blocks, 64, 576], in plain torch."""
    latent, scales, shared = cache_parts(cache, FP8_LATENT)
    wide = latent.float().unflatten(-1, (-1, GROUP)) * scales[..., None]
    return torch.cat([wide.flatten(-2), shared.float()], -1)


def rotate_reference(x: torch.Tensor, rope: Rope | None) -> torch.Tensor:
    """Channels i and i + R / 2 of x [..., R] turned by angle i; x itself without angles."""
    if rope is None:
        return x
    cos, sin = rope
    first, second = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def cache_parts(
    cache: torch.Tensor, latent: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of the cache: latent channels, scales (the latent again where there are none), rest."""
    if cache.dtype != torch.uint8:
        return cache[..., :latent], cache[..., :latent], cache[..., latent:]
    end = FP8_ROW - 2 * FP8_SHARED
    return (
        cache[..., :FP8_LATENT].view(torch.float8_e4m3fn),
        cache[..., FP8_LATENT:end].view(torch.float32),
        cache[..., end:].view(torch.bfloat16),
    )


def check_rows(latent: object, shared: object) -> None:
    """latent [T, L] and shared [T, R] of one float dtype; powers of two."""
    rows = checks.float_tensor("latent", latent)
    others = checks.like_but_shape("shared", shared, "latent", rows)
    for name, x, least in (("latent", rows, 32), ("shared", others, 16)):
        if x.dim() != 2 or x.shape[1] < least or x.shape[1] & (x.shape[1] - 1):
            raise KernelArgumentError(
                f"argument '{name}': shape {tuple(x.shape)}; it must be [T, channels] with a power "
                f"of two of at least {least} channels"
            )
    if rows.shape[0] != others.shape[0]:
        raise KernelArgumentError(
            f"argument 'shared': {others.shape[0]} rows; 'latent' has {rows.shape[0]}"
        )


def check_cache(name: str, cache: object, latent: int, shared: int, like: torch.Tensor) -> None:
    """A cache for rows of so many channels, in the dtype of `like` or fp8, on its device."""
    if not isinstance(cache, torch.Tensor):
        raise KernelArgumentError(
            f"argument '{name}': expected a tensor, got {type(cache).__name__}"
        )
    fp8 = cache.dtype == torch.uint8
    if fp8 and (like.dtype != torch.bfloat16 or (latent, shared) != (FP8_LATENT, FP8_SHARED)):
        raise KernelArgumentError(
            f"argument '{name}': uint8 (fp8 rows) goes with bfloat16 and {FP8_LATENT} + "
            f"{FP8_SHARED} channels, here {like.dtype} and {latent} + {shared}"
        )
    if not fp8 and cache.dtype != like.dtype:
        raise KernelArgumentError(
            f"argument '{name}': dtype {cache.dtype}; it must be {like.dtype} or torch.uint8"
        )
    wanted = FP8_ROW if fp8 else latent + shared
    if cache.dim() != 3 or cache.shape[1:] != (PAGE, wanted):
        raise KernelArgumentError(
            f"argument '{name}': shape {tuple(cache.shape)}; it must be [blocks, {PAGE}, {wanted}]"
        )
    misplaced = fp8 and any(x % 16 for x in (*cache.stride()[:2], cache.storage_offset()))
    if cache.stride(2) != 1 or misplaced:
        raise KernelArgumentError(
            f"argument '{name}': strides {cache.stride()}; rows must be contiguous"
            + (" and start at multiples of 16 bytes" if fp8 else "")
        )
    if cache.device != like.device:
        raise KernelArgumentError(
            f"argument '{name}': device {cache.device} differs from {like.device}"
        )


def check_rope(rope: object, shared: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """(cos, sin) for the rows of `shared` [..., R], each fp32 [..., R / 2]; None twice of None."""
    if rope is None:
        return None, None
    wanted = (*shared.shape[:-1], shared.shape[-1] // 2)
    parts = tuple(rope) if isinstance(rope, tuple | list) else ()
    if len(parts) != 2 or not all(
        isinstance(x, torch.Tensor) and x.dtype == torch.float32 and x.shape == wanted
        and x.device == shared.device
        for x in parts
    ):  # fmt: skip
        raise KernelArgumentError(
            f"argument 'rope': must be (cos, sin), two fp32 tensors of shape {wanted} on "
            f"{shared.device}, or None"
        )
    return parts


@operator("mla_cache_write", mutates_args=("cache",))
def _write_op(
    cache: torch.Tensor, latent: torch.Tensor, shared: torch.Tensor, slots: torch.Tensor,
    norm_weight: torch.Tensor | None, eps: float, cos: torch.Tensor | None,
    sin: torch.Tensor | None,
) -> None:  # fmt: skip
    if latent.shape[0] == 0 or cache.shape[0] == 0:
        return
    rows, others = dense(latent), dense(shared)
    to_latent, to_scale, to_shared = cache_parts(cache, rows.shape[1])
    weight = rows if norm_weight is None else norm_weight.contiguous()
    angles = [others if table is None else table.contiguous() for table in (cos, sin)]
    _write_kernel[(rows.shape[0],)](
        rows, others, slots.contiguous(), weight, *angles, to_latent, to_scale, to_shared,
        rows.stride(0), others.stride(0), others.shape[1] // 2, cache.shape[0],
        *to_latent.stride()[:2], *to_scale.stride()[:2], *to_shared.stride()[:2], eps,
        LATENT=rows.shape[1], SHARED=others.shape[1], NORM=norm_weight is not None,
        ROPE=cos is not None, FP8=cache.dtype == torch.uint8, PAGE=PAGE, GROUP=GROUP, num_warps=2,
    )  # fmt: skip


_write_op.register_fake(lambda *_: None)
