"""The routed experts of a mixture-of-experts layer: SiTU-GLU MLPs in latent space, with autograd.

    u_t = sum_j p_tj W2_e act_tj    act_tj = SiTU-GLU(W13_e z_t)    e = the j-th expert of token t

Source: Kimi K3 technical report, 2.3 (latent 3584, ff 3072, 896 experts, 16 per token) and eq. 12.
Three launches: the up projection gathers its tokens while loading and applies SiTU-GLU, the down
projection, the weighted sum of each token's rows (expert outputs rounded, then fp32 in the order
of j). Where a gradient will be needed the gate and up values h [R, 2 ff] are kept, nothing else;
the activation is computed again from them. The backward pass needs no expert outputs: the gradient
of p is sum_cols((W2^T du) * act), as in SonicMoE. No atomics, no host synchronisation.
"""

from __future__ import annotations

from typing import Any

import torch

import minitriton as triton
from minitriton.kernels import checks, grouped_gemm
from minitriton.kernels.moe_routing import Routing
from minitriton.kernels.norms import rms_norm, rms_norm_reference
from minitriton.kernels.operator import operator
from minitriton.kernels.rows import dense, new_like
from minitriton.kernels.situ import situ_glu_reference
from minitriton.kernels.situ_gemm import glu_config, strided_weight

BLOCK = 1024  # columns per program of gathers and sums
WIDEST = 8192  # columns of a row whose norm is taken
# rows per expert, below which the first product goes by 64 of a tile's rows and skips padding
FEW_ROWS = 512
TILE_ROWS = (16, 64, 128)  # rows of an expert's tile that the kernels are made for


def expert_tile_rows(tokens: int, topk: int, experts: int, mxfp4: bool = False) -> int:
    """The `tile_rows` to route with: 16, 64 or 128, by the mean number of rows per expert.

    Half a tile per expert is padding on average, but a larger tile reads the weights less often;
    mxfp4: for `moe_experts_mxfp4`, whose weights are small and dear to unpack for padding.
    """
    mean = tokens * topk / max(experts, 1)
    return 16 if mean <= 16 else 64 if mean <= (512 if mxfp4 else 64) else 128


def moe_experts(
    z: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    routing: Routing,
    weights: torch.Tensor | None = None,
    beta1: float = 4.0,
    beta2: float | None = 25.0,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """sum_j p_tj W2_e SiTU-GLU(W13_e z_t) per token; differentiable in all tensors.

    z: [T, latent]; w13: [E, 2 ff, latent], the ff gate rows of an expert first; w2: [E, latent,
    ff]; one dtype out of fp32, bf16, fp16 and one device; transposed weights are read in place.
    routing: of `moe_route`, its tables for T tokens and tiles of 16, 64 or 128 rows (see
    `expert_tile_rows`); of `local_experts` where w13 and w2 hold a slice of the experts, whose
    share of the sum is then the result. weights: [T, k] fp32, p; by default those of routing.
    beta2 = None leaves the up values uncapped. norm_weight: [latent], fp32 or the dtype of z, gives
    the RMS norm of the sum (latent <= 8192), in the same launch where no gradient is wanted.

    The result is [T, latent], contiguous, in the dtype of z. Gradients of weights are contiguous;
    those of experts without tokens are zero. fp32 is multiplied as three tf32 products. Grids
    depend on shapes alone, so CUDA graphs can capture forward and backward.
    KernelArgumentError names the argument that does not fit.
    """
    check_operands(z, w13, w2)
    p = check_routing(z, w13.shape[0], routing, weights)
    cap = None if beta2 is None else checks.positive("beta2", beta2)
    check_norm(z, norm_weight)
    eps = checks.positive("eps", eps)
    wanted = (z, w13, w2, p) if norm_weight is None else (z, w13, w2, p, norm_weight)
    save = torch.is_grad_enabled() and any(x.requires_grad for x in wanted)
    tables = (routing.row_of_slot, routing.token_of_row, routing.expert_of_tile)
    u = _moe_experts_op(
        z, w13, w2, p, *tables, routing.offsets, routing.counts, checks.positive("beta1", beta1),
        cap, None if save else norm_weight, eps, save,
    )[0]  # fmt: skip
    return rms_norm(u, norm_weight, eps) if save and norm_weight is not None else u


def moe_experts_reference(
    z: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    routing: Routing,
    weights: torch.Tensor | None = None,
    beta1: float = 4.0,
    beta2: float | None = 25.0,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """`moe_experts` in plain torch, expert by expert, in the dtype of its arguments."""
    p = (routing.weights if weights is None else weights).to(z.dtype).reshape(-1)
    slot_of_row = torch.full_like(routing.token_of_row, -1, dtype=torch.int64)
    rows = routing.row_of_slot.reshape(-1).long()
    local = (rows >= 0).nonzero()[:, 0]
    slot_of_row[rows[local]] = local
    u = torch.zeros_like(z)
    for expert in range(w13.shape[0]):
        first, count = int(routing.offsets[expert]), int(routing.counts[expert])
        span = slice(first, first + count)
        token = routing.token_of_row[span].long()
        gate, up = (z[token] @ w13[expert].T).chunk(2, -1)
        y = situ_glu_reference(gate, up, beta1, beta2) @ w2[expert].T
        u = u.index_add(0, token, y * p[slot_of_row[span], None])
    return u if norm_weight is None else rms_norm_reference(u, norm_weight, eps)


def local_experts(routing: Routing, first: int, count: int) -> Routing:
    """The share of experts first .. first + count - 1 in a routing, for expert parallelism.

    Experts are numbered from 0 in `counts`, `offsets` and `expert_of_tile`; tiles and slots of
    other experts become -1; rows keep their numbers. No host synchronisation.
    KernelArgumentError for a range that the routing does not have.
    """
    experts = routing.counts.shape[0]
    if first < 0 or count < 0 or first + count > experts:
        raise checks.KernelArgumentError(
            f"argument 'first': experts {first} .. {first + count - 1} are not within 0 .. "
            f"{experts - 1}"
        )
    tile = routing.expert_of_tile
    here = (tile >= first) & (tile < first + count)
    chosen = (routing.experts >= first) & (routing.experts < first + count)
    return routing._replace(
        counts=routing.counts[first : first + count],
        offsets=routing.offsets[first : first + count + 1],
        row_of_slot=torch.where(chosen, routing.row_of_slot, -1),
        expert_of_tile=torch.where(here, tile - first, -1),
    )


def check_operands(z: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> None:
    """Refuses activations and weights that do not fit each other."""
    for name, x, rank, shape in (
        ("z", z, 2, "[T, latent]"), ("w13", w13, 3, "[E, 2 ff, latent]"),
        ("w2", w2, 3, "[E, latent, ff]"),
    ):  # fmt: skip
        checks.float_tensor(name, x)
        if x.dim() != rank or 0 in x.shape[-1:]:
            raise checks.KernelArgumentError(
                f"argument '{name}': shape {tuple(x.shape)}; it must be {shape}, not empty"
            )
        checks.like_but_shape(name, x, "z", z)
    experts, double, latent = w13.shape
    for name, x, wanted in (
        ("w13", w13, (experts, double + double % 2, z.shape[1])),
        ("w2", w2, (experts, latent, double // 2)),
    ):
        if x.shape != wanted:
            raise checks.KernelArgumentError(
                f"argument '{name}': shape {tuple(x.shape)}; 'z' of shape {tuple(z.shape)} and "
                f"'w13' of shape {tuple(w13.shape)} need {wanted}"
            )


def check_norm(z: torch.Tensor, norm_weight: torch.Tensor | None) -> None:
    """Refuses a weight of the RMS norm that does not fit."""
    if (
        norm_weight is not None
        and checks.row_vector("norm_weight", norm_weight, "z", z).numel() > WIDEST
    ):
        raise checks.KernelArgumentError(
            f"argument 'norm_weight': shape {tuple(norm_weight.shape)}; a norm takes up to {WIDEST}"
        )


def check_routing(
    z: torch.Tensor, experts: int, routing: Routing, weights: torch.Tensor | None
) -> torch.Tensor:
    """Refuses tables that do not belong to these tokens and experts; returns the weights."""
    if not isinstance(routing, Routing):
        raise checks.KernelArgumentError(
            f"argument 'routing': expected a Routing, got {type(routing).__name__}"
        )
    rows, tiles = routing.token_of_row.shape[0], routing.expert_of_tile.shape[0]
    if tiles and (rows % tiles or rows // tiles not in TILE_ROWS):
        raise checks.KernelArgumentError(
            f"argument 'routing': {rows} rows in {tiles} tiles; route with tile_rows 16, 64 or 128"
        )
    p = checks.float_tensor("weights", routing.weights if weights is None else weights)
    slots = (z.shape[0], routing.row_of_slot.shape[-1])
    wanted = {"row_of_slot": slots, "counts": (experts,), "offsets": (experts + 1,)}
    for name, shape in wanted.items():
        if getattr(routing, name).shape != shape:
            raise checks.KernelArgumentError(
                f"argument 'routing': {name} has shape {tuple(getattr(routing, name).shape)}; "
                f"{z.shape[0]} tokens and {experts} experts need {shape}"
            )
    for name in (*wanted, "token_of_row", "expert_of_tile"):
        table = getattr(routing, name)
        if table.dtype != torch.int32 or table.device != z.device or not table.is_contiguous():
            raise checks.KernelArgumentError(
                f"argument 'routing': {name} must be contiguous int32 on {z.device}, "
                f"got {table.dtype} on {table.device}"
            )
    if p.shape != slots or p.dtype != torch.float32 or p.device != z.device:
        raise checks.KernelArgumentError(
            f"argument 'weights': shape {tuple(p.shape)}, {p.dtype} on {p.device}; it must be "
            f"{slots}, torch.float32 on {z.device}"
        )
    return p


def _rows_config(dtype: torch.dtype, rows: int, columns: int, depth: int) -> dict[str, int]:
    """Launch configuration of one product with tiles of so many rows."""
    if dtype == torch.float32 or columns % 16 or depth % 16:  # odd sizes go element by element
        warps = 4 if rows < 64 else 8
        return {"BLOCK_N": 64, "BLOCK_K": 32, "num_warps": warps, "num_stages": 3}
    wide = rows == 128 and columns % 256 == 0
    return {
        "BLOCK_N": 256 if wide else 128, "BLOCK_K": 64, "num_warps": 8 if rows == 128 else 4,
        "num_stages": 4,
    }  # fmt: skip


def _weights_config(dtype: torch.dtype, rows: int, columns: int) -> dict[str, int]:
    """Launch configuration of a weight gradient; odd sizes are read element by element. An expert's
    sum is short, so several CTAs per SM, of which some store while others multiply."""
    small = dtype == torch.float32 or rows % 16 or columns % 16
    block, warps = (64, 8) if small else (128, 4)
    return {
        "BLOCK_M": block, "BLOCK_N": block, "BLOCK_K": 32, "GROUP": grouped_gemm.GROUP,
        "num_warps": warps, "num_stages": 3,
    }  # fmt: skip


def _launch_rows(
    a: torch.Tensor, token_of_row: torch.Tensor | None, w: torch.Tensor,
    expert_of_tile: torch.Tensor, rows: int,
) -> torch.Tensor:  # fmt: skip
    """Row by row a[r] W_e^T, or a[token_of_row[r]] W_e^T, for w [E, columns, depth] of any strides;
    rows of no tile stay unset."""
    tiles, (_, columns, depth) = expert_of_tile.shape[0], w.shape
    out = a.new_empty(rows, columns)
    tile = rows // tiles
    config = _rows_config(a.dtype, tile, columns, depth)
    grouped_gemm.rows_kernel[(tiles * triton.cdiv(columns, config["BLOCK_N"]),)](
        a, w, out, token_of_row, expert_of_tile, a.stride(0), *w.stride(), tiles, columns, depth,
        EVEN=depth % config["BLOCK_K"] == 0, PRECISION="tf32x3", ROWS=tile,
        GROUP=grouped_gemm.GROUP, **config,
    )  # fmt: skip
    return out


def launch_sum(
    rows: torch.Tensor, weights: torch.Tensor | None, row_of_slot: torch.Tensor, out: torch.Tensor,
    norm_weight: torch.Tensor | None = None, eps: float = 1.0,
) -> None:  # fmt: skip
    """out[t] = sum_j weights[t, j] rows[row_of_slot[t, j]], weights 1 for None; or its RMS norm."""
    (tokens, slots), columns = row_of_slot.shape, rows.shape[1]
    block = BLOCK if norm_weight is None else triton.next_power_of_2(columns)
    grouped_gemm.combine_kernel[(tokens, triton.cdiv(columns, block))](
        rows, weights if weights is None else weights.contiguous(), row_of_slot,
        norm_weight if norm_weight is None else norm_weight.contiguous(), out, columns, eps,
        SLOTS=slots, BLOCK=block, num_warps=max(4, block // 1024),
    )  # fmt: skip


def _gather(x: torch.Tensor, token_of_row: torch.Tensor) -> torch.Tensor:
    rows, columns = token_of_row.shape[0], x.shape[1]
    out = x.new_empty(rows, columns)
    grouped_gemm.gather_kernel[(rows, triton.cdiv(columns, BLOCK))](
        x, token_of_row, out, x.stride(0), columns, BLOCK=BLOCK
    )
    return out


def _launch_weight_gradient(
    a: torch.Tensor, b: torch.Tensor, dw: torch.Tensor, offsets: torch.Tensor, counts: torch.Tensor
) -> None:
    experts, rows, columns = dw.shape
    config = _weights_config(a.dtype, rows, columns)
    blocks = triton.cdiv(rows, config["BLOCK_M"]) * triton.cdiv(columns, config["BLOCK_N"])
    grouped_gemm.weights_backward_kernel[(blocks, experts)](
        a, b, dw, offsets, counts, rows, columns, PRECISION="tf32x3", **config
    )


@operator("moe_experts")
def _moe_experts_op(
    z: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor,
    row_of_slot: torch.Tensor, token_of_row: torch.Tensor, expert_of_tile: torch.Tensor,
    offsets: torch.Tensor, counts: torch.Tensor, beta1: float, beta2: float | None,
    norm_weight: torch.Tensor | None, eps: float, save: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(u, h); with norm_weight the norm of u, which nothing can differentiate."""
    u, h = _empty_outputs(z, w13, token_of_row, save)
    tiles, rows = expert_of_tile.shape[0], token_of_row.shape[0]
    if tiles == 0:
        return u.zero_(), h
    x, w, tile = dense(z), strided_weight(w13), rows // tiles
    columns, depth = w.shape[1] // 2, w.shape[2]
    part = min(tile, 64) if row_of_slot.numel() < FEW_ROWS * w.shape[0] else tile
    config = glu_config(z.dtype, part, columns, depth, True)
    act = z.new_empty(rows, columns)
    grouped_gemm.up_kernel[(rows // part * triton.cdiv(columns, config["BLOCK_N"]),)](
        x, w, act, h, token_of_row, expert_of_tile, x.stride(0), *w.stride(), tiles, columns, depth,
        beta1, beta2 or 1.0, CAPPED=beta2 is not None, EXACT=z.dtype != torch.bfloat16, SAVE=save,
        EVEN=depth % config["BLOCK_K"] == 0, WHOLE=columns % config["BLOCK_N"] == 0,
        PRECISION="tf32x3", ROWS=part, PARTS=tile // part, GROUP=grouped_gemm.GROUP, **config,
    )  # fmt: skip
    y = _launch_rows(act, None, strided_weight(w2), expert_of_tile, rows)
    launch_sum(y, weights, row_of_slot, u, norm_weight, eps)
    return u, h


@operator("moe_experts_backward")
def _backward_op(
    du: torch.Tensor, z: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor,
    h: torch.Tensor, row_of_slot: torch.Tensor, token_of_row: torch.Tensor,
    expert_of_tile: torch.Tensor, offsets: torch.Tensor, counts: torch.Tensor,
    beta1: float, beta2: float | None, frozen: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of z, w13, w2 and weights; frozen: those of w13 and w2 are not computed."""
    dz, dw13, dw2, dweights = gradients = _empty_gradients(z, w13, w2, weights, frozen)
    if expert_of_tile.shape[0] == 0:
        for gradient in gradients:
            gradient.zero_()
        return gradients
    dy, rows = dense(du), h.shape[0]
    transposed = strided_weight(w2).transpose(1, 2)
    dact = _launch_rows(dy, token_of_row, transposed, expert_of_tile, rows)
    dh, act = torch.empty_like(h), torch.empty_like(dact)
    dweights.zero_()  # slots of other ranks
    slots, columns = row_of_slot.shape[1], act.shape[1]
    grouped_gemm.glu_backward_kernel[(rows,)](
        dact, h, weights.contiguous(), dh, act, dweights, token_of_row, row_of_slot, expert_of_tile,
        rows // expert_of_tile.shape[0], columns, slots, beta1, beta2 or 1.0,
        CAPPED=beta2 is not None, EXACT=h.dtype != torch.bfloat16,
        SLOTS=triton.next_power_of_2(slots), BLOCK=BLOCK,
    )  # fmt: skip
    dx = _launch_rows(dh, None, strided_weight(w13).transpose(1, 2), expert_of_tile, rows)
    launch_sum(dx, None, row_of_slot, dz)
    if not frozen:
        _launch_weight_gradient(_gather(dy, token_of_row), act, dw2, offsets, counts)
        _launch_weight_gradient(dh, _gather(dense(z), token_of_row), dw13, offsets, counts)
    return gradients


def _empty_outputs(
    z: torch.Tensor, w13: torch.Tensor, token_of_row: torch.Tensor, save: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    u = new_like(z)
    return u, z.new_empty(token_of_row.shape[0] if save else 0, w13.shape[1])


def _empty_gradients(
    z: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, frozen: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    shapes = (z.shape, *((0,) if frozen else x.shape for x in (w13, w2)))
    dz, dw13, dw2 = (torch.empty(s, dtype=z.dtype, device=z.device) for s in shapes)
    return dz, dw13, dw2, torch.empty(weights.shape, device=z.device)


_moe_experts_op.register_fake(
    lambda z, w13, w2, weights, slots, tokens, tiles, offsets, counts, b1, b2, norm, eps, save: (
        _empty_outputs(z, w13, tokens, save)
    )
)
_backward_op.register_fake(
    lambda du, z, w13, w2, weights, h, slots, tokens, tiles, offsets, counts, b1, b2, frozen: (
        _empty_gradients(z, w13, w2, weights, frozen)
    )
)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:4], output[1], *inputs[4:9])
    ctx.betas = inputs[9:11]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros for what has no gradient


def _differentiate(ctx: Any, du: torch.Tensor | None, _: Any) -> Any:
    if du is None:
        return (None,) * 14
    frozen = not any(ctx.needs_input_grad[1:3])
    dz, dw13, dw2, dweights = _backward_op(du, *ctx.saved_tensors, *ctx.betas, frozen)
    experts = (None, None) if frozen else (dw13, dw2)
    return dz, *experts, dweights, *(None,) * 10


_moe_experts_op.register_autograd(_differentiate, setup_context=_save)
