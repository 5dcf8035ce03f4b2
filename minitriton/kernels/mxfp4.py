"""MXFP4 (OCP MX 1.0): blocks of 32 four-bit floats along the last dimension share a power of two.

    value = E2M1 * 2^(scale - 127)      E2M1: sign and {0, 0.5, 1, 1.5, 2, 3, 4, 6}

Two codes per byte, the even element in the low nibble; one E8M0 scale byte per block. Scale rules:
"ceil", 2^ceil(log2(amax / 6)), so that nothing saturates (what Kimi K3's checkpoint shows), and
"ocp", 2^(floor(log2 amax) - 2), where magnitudes above 6 of a block saturate. Rounding is to
nearest, ties to the even code. Sources: OCP Microscaling Formats 1.0; Kimi K3 technical report,
4.1.4.
"""

from __future__ import annotations

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels import checks
from minitriton.kernels.operator import operator

BLOCK = 32  # elements that share a scale
PER_PROGRAM = 64  # blocks
RULES = ("ceil", "ocp")
TINY = 2.0**-120  # the largest magnitude of a block counts as no less
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@triton.jit
def _code(y):
    """The E2M1 code nearest to y, ties to even codes."""
    a = tl.abs(y)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32)
    code += (a >= 1.75).to(tl.int32) + (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32)
    return code + (a > 5.0).to(tl.int32) + (y < 0).to(tl.int32) * 8


@triton.jit
def _quantize_kernel(
    w_ptr, packed_ptr, scales_ptr, blocks, tiny, CEIL: tl.constexpr, BLOCKS: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    mask = (block < blocks)[:, None]
    w = tl.load(w_ptr + block[:, None] * 32 + tl.arange(0, 32)[None, :], mask=mask, other=0.0)
    w = w.to(tl.float32)
    peak = tl.maximum(tl.max(tl.abs(w), axis=1), tiny)
    bits = peak.to(tl.int32, bitcast=True)
    scale = (bits >> 23) - 2  # the byte of 2^(floor(log2 peak) - 2)
    if CEIL:
        scale += ((bits & 0x7FFFFF) > 0x400000).to(tl.int32)  # peak above 1.5 * 2^floor(log2 peak)
    y = w * ((254 - scale) << 23).to(tl.float32, bitcast=True)[:, None]
    even, odd = tl.split(tl.reshape(y, [BLOCKS, 16, 2]))
    packed = _code(even) | (_code(odd) << 4)
    at = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(packed_ptr + at, packed.to(tl.uint8), mask=mask)
    tl.store(scales_ptr + block, scale.to(tl.uint8), mask=block < blocks)


@triton.jit
def _value(code):
    """fp32 of the E2M1 codes in the low four bits."""
    bits = ((code & 7) << 22) | ((code & 8) << 28)  # as if fp32 had E2M1's exponent bias
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def _dequantize_kernel(packed_ptr, scales_ptr, out_ptr, blocks, BLOCKS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    mask = (block < blocks)[:, None]
    at = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    packed = tl.load(packed_ptr + at, mask=mask, other=0).to(tl.int32)
    byte = tl.load(scales_ptr + block, mask=block < blocks, other=127).to(tl.int32)
    bits = tl.where(byte == 0, 0x400000, byte << 23)  # 2^-127 is subnormal
    scale = bits.to(tl.float32, bitcast=True)[:, None]
    w = tl.interleave(_value(packed) * scale, _value(packed >> 4) * scale)
    out_ptrs = out_ptr + block[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(out_ptrs, w.to(out_ptr.dtype.element_ty), mask=mask)


def mxfp4_quantize(w: torch.Tensor, rule: str = "ceil") -> tuple[torch.Tensor, torch.Tensor]:
    """(packed uint8 [..., K / 2], scales uint8 [..., K / 32]) of w; not differentiable.

    w: [..., K], fp32, bf16 or fp16, finite, K a multiple of 32, without requires_grad. rule: "ceil"
    or "ocp", see above. The largest magnitude of a block counts as at least 2^-120, so that scales
    are 2^-122 and more. KernelArgumentError for anything else.
    """
    checks.float_tensor("w", w)
    if w.shape[-1] % BLOCK:
        raise checks.KernelArgumentError(
            f"argument 'w': shape {tuple(w.shape)}; the last dimension must be a multiple of 32"
        )
    if rule not in RULES:
        raise checks.KernelArgumentError(f"argument 'rule': {rule!r}; it must be one of {RULES}")
    if torch.is_grad_enabled() and w.requires_grad:
        raise checks.KernelArgumentError("argument 'w': requires_grad; pass w.detach()")
    return _quantize_op(w, rule == "ceil")


def mxfp4_dequantize(
    packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """The values [..., K] of packed [..., K / 2] and scales [..., K / 32] in fp32, bf16 or fp16.

    Exact in fp32 and bf16 but for subnormal results; a scale byte of 255 gives no finite value.
    KernelArgumentError for other dtypes and shapes that do not fit each other.
    """
    check_mxfp4("packed", packed, "scales", scales)
    if dtype not in checks.FLOATS:
        raise checks.KernelArgumentError(
            f"argument 'dtype': {dtype}; it must be float32, bfloat16 or float16"
        )
    return _dequantize_op(packed, scales, dtype)


def mxfp4_quantize_reference(
    w: torch.Tensor, rule: str = "ceil"
) -> tuple[torch.Tensor, torch.Tensor]:
    """`mxfp4_quantize` in plain torch, in fp64."""
    x = w.double().reshape(*w.shape[:-1], w.shape[-1] // BLOCK, BLOCK)
    peak = x.abs().amax(-1).clamp(min=TINY)
    mantissa, exponent = torch.frexp(peak)  # mantissa in [0.5, 1)
    exponent = exponent.double() - 3
    if rule == "ceil":
        exponent += mantissa > 0.75
    y = (x * torch.exp2(-exponent)[..., None]).reshape(w.shape)
    table = torch.tensor(MAGNITUDES, dtype=torch.float64, device=w.device)
    distance = (y.abs().clamp(max=6)[..., None] - table).abs()
    # even codes first: argmin takes the first of equals
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7], device=w.device)
    code = (order[distance[..., order].argmin(-1)] + 8 * (y < 0)).to(torch.uint8)
    return code[..., 0::2] | code[..., 1::2] << 4, (exponent + 127).to(torch.uint8)


def mxfp4_dequantize_reference(
    packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """`mxfp4_dequantize` in plain torch, computed in fp64."""
    code = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    table = torch.tensor(MAGNITUDES, dtype=torch.float64, device=packed.device)
    value = table[code & 7] * (1.0 - 2.0 * (code >> 3))
    scale = torch.exp2(scales.double() - 127).repeat_interleave(BLOCK, -1)
    return (value * scale).to(dtype)


def check_mxfp4(name: str, packed: torch.Tensor, scales_name: str, scales: torch.Tensor) -> None:
    """Refuses what is not a pair of codes and scales."""
    for label, x in ((name, packed), (scales_name, scales)):
        if not isinstance(x, torch.Tensor) or x.dtype != torch.uint8 or x.dim() == 0:
            shown = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
            raise checks.KernelArgumentError(
                f"argument '{label}': expected a uint8 tensor, got {shown}"
            )
    wanted = (*packed.shape[:-1], packed.shape[-1] // 16)
    if packed.shape[-1] % 16 or scales.shape != wanted or scales.device != packed.device:
        raise checks.KernelArgumentError(
            f"argument '{scales_name}': shape {tuple(scales.shape)} on {scales.device}; '{name}', "
            f"shape {tuple(packed.shape)} on {packed.device}, needs [..., K / 32] for [..., K / 2]"
        )


@operator("mxfp4_quantize")
def _quantize_op(w: torch.Tensor, ceil: bool) -> tuple[torch.Tensor, torch.Tensor]:
    packed, scales = _empty_quantized(w)
    blocks = scales.numel()
    if blocks > 0:
        _quantize_kernel[(triton.cdiv(blocks, PER_PROGRAM),)](
            w.contiguous(), packed, scales, blocks, TINY, CEIL=ceil, BLOCKS=PER_PROGRAM
        )
    return packed, scales


@operator("mxfp4_dequantize")
def _dequantize_op(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = _empty_values(packed, dtype)
    blocks = scales.numel()
    if blocks > 0:
        _dequantize_kernel[(triton.cdiv(blocks, PER_PROGRAM),)](
            packed.contiguous(), scales.contiguous(), out, blocks, BLOCKS=PER_PROGRAM
        )
    return out


def _empty_quantized(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    packed = w.new_empty(*w.shape[:-1], w.shape[-1] // 2, dtype=torch.uint8)
    return packed, w.new_empty(*w.shape[:-1], w.shape[-1] // BLOCK, dtype=torch.uint8)


def _empty_values(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return packed.new_empty(*packed.shape[:-1], packed.shape[-1] * 2, dtype=dtype)


_quantize_op.register_fake(lambda w, ceil: _empty_quantized(w))
_dequantize_op.register_fake(lambda packed, scales, dtype: _empty_values(packed, dtype))
