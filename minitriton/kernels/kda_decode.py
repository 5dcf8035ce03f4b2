"""Kimi Delta Attention (KDA), recurrent: the decode form, token by token, forward only.

    S *= exp(g_t)  (per key channel)     u = beta_t (v_t - S^T k_t)     S += k_t u^T
    o_t = scale S^T q_t                  y_t = sigmoid(out_gate_t) RMSNorm(o_t) norm_weight

Source: Kimi K3 technical report, equations 1 to 6; Kimi Linear (arXiv 2510.26692). One
launch reads each state once and writes it once, whatever the number of tokens, with the gate, the
L2 norms and the output norm fused. The arithmetic is fp32; states are kept in fp32 or bf16. For
long sequences and for gradients there is `chunk_kda`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

import minitriton as triton
from minitriton.kernels import checks
from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.kda import (
    check_gate,
    check_tensors,
    chunk_kda_reference,
    state_shape,
)
from minitriton.kernels.kda_decode_kernels import recurrent_kernel
from minitriton.kernels.operator import operator
from minitriton.kernels.packing import bounds_on, count_sequences
from minitriton.kernels.rows import dense, new_like
from minitriton.kernels.short_conv_step import check_slots

STATES = (torch.float32, torch.bfloat16)


def recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    gate: str | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    gate_floor: float = -5.0,
    qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    state_layout: str = "kv",
    cu_seqlens: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    state_indices: torch.Tensor | None = None,
    out_gate: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(o, state after the last token or None); no gradients.

    q, k, v, g, beta, the gate and the scale are those of `chunk_kda`, for any number of tokens. The
    state comes in one of two ways, in fp32 or bf16, laid out as [.., H, K, V] ("kv") or
    [.., H, V, K] ("vk", `state_layout`):
    - initial_state [N, H, ..], zeros if None, is left alone; output_final_state returns a new
      tensor in its dtype, or fp32;
    - state [S, H, ..], a cache, is updated in place and None is returned; slots, heads and rows may
      lie apart, the elements of a row may not. state_indices: int32 [N], the slot of each sequence,
      each at most once; -1 skips the sequence, whose o is zeros. Slots are not checked. Without it
      S = N.
    N is B, or with cu_seqlens (int32 or int64 [N + 1], B = 1) their number less one; bounds on the
    CPU are checked, those on a GPU are not read by the host and must rise from 0 to T.

    out_gate, [B, T, H, V] in the dtype of q, turns o into sigmoid(out_gate) * RMSNorm(o), with
    norm_weight [V] in fp32 or that dtype, or None for ones, and norm_eps.

    Inputs that require a gradient are refused unless under `torch.no_grad()`. KernelArgumentError
    names the argument that does not fit.
    """
    checks.no_gradient(
        "use chunk_kda, or call it under torch.no_grad()", q=q, k=k, v=v, g=g, beta=beta,
        A_log=A_log, dt_bias=dt_bias, initial_state=initial_state, state=state, out_gate=out_gate,
        norm_weight=norm_weight,
    )  # fmt: skip
    check_tensors(q, k, v, g, beta)
    sequences = count_sequences(cu_seqlens, q)
    _check_states(state_layout, initial_state, output_final_state, state, state_indices, sequences,
                  q, v)  # fmt: skip
    _check_norm(out_gate, norm_weight, v)
    options = Options(
        q.shape[3] ** -0.5 if scale is None else checks.positive("scale", scale),
        check_gate(gate, A_log, dt_bias, gate_floor, q), float(gate_floor), bool(qk_l2norm),
        bool(beta_sigmoid), state_layout == "vk", checks.positive("norm_eps", norm_eps),
    )  # fmt: skip
    inputs = (q, k, v, g, beta, *((A_log, dt_bias) if gate else (None, None)))
    rest = (cu_seqlens, out_gate, norm_weight, *options)
    if state is not None:
        return _step_op(state, state_indices, *inputs, *rest), None
    o, final = _recurrent_op(initial_state, bool(output_final_state), *inputs, *rest)
    return o, final if output_final_state else None


def recurrent_kda_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, *,
    state_layout: str = "kv", initial_state: torch.Tensor | None = None,
    output_final_state: bool = False, state: torch.Tensor | None = None,
    state_indices: torch.Tensor | None = None, out_gate: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None, norm_eps: float = 1e-5, **rest: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """`recurrent_kda` in plain torch, in the dtype of its arguments; also updates `state`.

    Of sequences that are skipped, o is what it would be from a state of zeros.
    """
    if state is not None:
        slots = torch.arange(len(state)) if state_indices is None else state_indices.cpu().long()
        live = slots >= 0
        initial_state = state[slots.clamp(min=0).to(state.device)].to(q.dtype)
        initial_state[~live.to(state.device)] = 0
    o, final = chunk_kda_reference(
        q, k, v, g, beta, initial_state=initial_state, state_layout=state_layout,
        output_final_state=output_final_state or state is not None, **rest,
    )  # fmt: skip
    if state is not None and final is not None:
        state[slots[live].to(state.device)] = final[live.to(state.device)].to(state.dtype)
    if out_gate is not None:
        o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + norm_eps)
        o = (o if norm_weight is None else o * norm_weight) * torch.sigmoid(out_gate)
    return o, final if output_final_state and state is None else None


class Options(NamedTuple):
    """Numbers and switches of a call, as the operators take them."""

    scale: float
    gate: int  # 0: logarithm of the decay, 1: sigmoid, 2: softplus
    floor: float
    qk_l2norm: bool
    beta_sigmoid: bool
    value_major: bool
    eps: float


def _check_states(
    layout: str, initial: object, output_final: bool, state: object, slots: object, sequences: int,
    q: torch.Tensor, v: torch.Tensor,
) -> None:  # fmt: skip
    if layout not in ("kv", "vk"):
        raise KernelArgumentError(f"argument 'state_layout': must be 'kv' or 'vk', got {layout!r}")
    shape = state_shape(sequences, q, v, layout == "vk")
    if state is None:
        if slots is not None:
            raise KernelArgumentError(
                "argument 'state_indices': slots need a cache to point into; give 'state'"
            )
        if initial is not None:
            _check_state("initial_state", initial, shape, q)
        return
    if initial is not None or output_final:
        raise KernelArgumentError(
            "argument 'state': a cache updated in place takes the place of 'initial_state' and "
            "'output_final_state'; give it alone"
        )
    if slots is not None:
        check_slots(slots, q, sequences)
        first = state.shape[0] if isinstance(state, torch.Tensor) and state.dim() > 0 else 0
        shape = (first, *shape[1:])
    tensor = _check_state("state", state, shape, q)
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise KernelArgumentError(
            f"argument 'state': stride {tensor.stride(-1)} between the elements of a row; it must "
            "be 1 to be updated in place"
        )


def _check_state(name: str, value: object, shape: tuple[int, ...], q: torch.Tensor) -> torch.Tensor:
    tensor = checks.float_tensor(name, value)
    if tuple(tensor.shape) != shape:
        raise KernelArgumentError(
            f"argument '{name}': shape {tuple(tensor.shape)}; it must be {shape} (sequences, "
            "heads, and the two dimensions of 'state_layout')"
        )
    if tensor.dtype not in STATES or tensor.device != q.device:
        raise KernelArgumentError(
            f"argument '{name}': {tensor.dtype} on {tensor.device}; it must be torch.float32 or "
            f"torch.bfloat16 on {q.device}"
        )
    return tensor


def _check_norm(out_gate: object, norm_weight: object, v: torch.Tensor) -> None:
    if out_gate is not None:
        checks.like("out_gate", out_gate, "v", v)
        if norm_weight is not None:
            checks.row_vector("norm_weight", norm_weight, "v", v)
    elif norm_weight is not None:
        raise KernelArgumentError(
            "argument 'norm_weight': there is no norm without a gate; give 'out_gate'"
        )


@dataclass(frozen=True)
class _States:
    """Where states are read and written; both the same tensor for a cache."""

    initial: torch.Tensor | None
    final: torch.Tensor | None
    slots: torch.Tensor | None
    sequences: int


def _tile(
    keys: int, values: int, dtype: torch.dtype, value_major: bool, gated: bool
) -> tuple[dict[str, int], int]:
    """(constants, warps). One warp per program, so that no sum crosses warps and many loads are
    in flight; the output norm needs all values of a head in one program."""
    k_block, v_block = (max(16, triton.next_power_of_2(n)) for n in (keys, values))
    if gated:
        return {"K_BLOCK": k_block, "V_BLOCK": v_block}, max(1, k_block * v_block // 2048)
    if dtype == torch.float32:
        piece = 16
    else:  # 64 bytes of a "kv" row as in fp32; "vk" rows are read whole, so few of them
        piece = 8 if value_major else 32
    # rows that 16 bytes do not divide leave few lanes for keys, and too many keys for a thread
    even = value_major or values * dtype.itemsize % 16 == 0
    return {"K_BLOCK": k_block, "V_BLOCK": min(v_block, piece)}, 1 if even else 4


def _launch(
    states: _States, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor,
    beta: torch.Tensor, a_log: torch.Tensor | None, dt_bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None, out_gate: torch.Tensor | None,
    norm_weight: torch.Tensor | None, options: Options,
) -> torch.Tensor:  # fmt: skip
    out = new_like(v)
    (_, tokens, heads, keys), values = q.shape, v.shape[3]
    if states.sequences * heads == 0:
        return out
    q, k, v, g = (dense(x) for x in (q, k, v, g))
    bounds = None if cu_seqlens is None else bounds_on(q.device, cu_seqlens, tokens)
    gate = v if out_gate is None else dense(out_gate)
    initial, final = (v if x is None else x for x in (states.initial, states.final))
    strides = [(0, 0, 0) if x is v else x.stride()[:3] for x in (initial, final)]
    kept = initial if states.initial is not None else final
    tile, warps = _tile(keys, values, kept.dtype, options.value_major, out_gate is not None)
    grid = (states.sequences * heads * triton.cdiv(values, tile["V_BLOCK"]),)

    def vector(x: torch.Tensor | None) -> torch.Tensor:
        return q if x is None else x.contiguous()

    recurrent_kernel[grid](
        q, k, v, g, beta, vector(a_log), vector(dt_bias), initial, final, vector(states.slots),
        vector(bounds), gate, vector(norm_weight), out,
        *(x.stride()[:3] for x in (q, k, v, g, beta, gate)), *(x[:2] for x in strides),
        tokens, heads, options.scale, options.floor, options.eps,
        GATE=options.gate, BIASED=dt_bias is not None, L2NORM=options.qk_l2norm,
        SIGMOID=options.beta_sigmoid, INITIAL=states.initial is not None,
        FINAL=states.final is not None, SLOTS=states.slots is not None, PACKED=bounds is not None,
        VALUE_MAJOR=options.value_major, GATED=out_gate is not None,
        WEIGHTED=norm_weight is not None, KEYS=keys, VALUES=values, STATE_ROW=strides[0][2],
        FINAL_ROW=strides[1][2], **tile, num_warps=warps,
    )  # fmt: skip
    return out


@operator("recurrent_kda")
def _recurrent_op(
    initial: torch.Tensor | None, output_final: bool, q: torch.Tensor, k: torch.Tensor,
    v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, a_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None, cu_seqlens: torch.Tensor | None, out_gate: torch.Tensor | None,
    norm_weight: torch.Tensor | None, scale: float, gate: int, floor: float, qk_l2norm: bool,
    beta_sigmoid: bool, value_major: bool, eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    final = _empty_final(initial, output_final, q, v, cu_seqlens, value_major)
    states = _States(
        None if initial is None else initial.contiguous(), final if output_final else None, None,
        count_sequences(cu_seqlens, q),
    )  # fmt: skip
    options = Options(scale, gate, floor, qk_l2norm, beta_sigmoid, value_major, eps)
    return _launch(states, q, k, v, g, beta, a_log, dt_bias, cu_seqlens, out_gate, norm_weight,
                   options), final  # fmt: skip


@operator("recurrent_kda_step", mutates_args=("state",))
def _step_op(
    state: torch.Tensor, slots: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor,
    v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, a_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None, cu_seqlens: torch.Tensor | None, out_gate: torch.Tensor | None,
    norm_weight: torch.Tensor | None, scale: float, gate: int, floor: float, qk_l2norm: bool,
    beta_sigmoid: bool, value_major: bool, eps: float,
) -> torch.Tensor:  # fmt: skip
    states = _States(state, state, slots, count_sequences(cu_seqlens, q))
    options = Options(scale, gate, floor, qk_l2norm, beta_sigmoid, value_major, eps)
    return _launch(states, q, k, v, g, beta, a_log, dt_bias, cu_seqlens, out_gate, norm_weight,
                   options)  # fmt: skip


def _empty_final(
    initial: torch.Tensor | None, wanted: bool, q: torch.Tensor, v: torch.Tensor,
    cu_seqlens: torch.Tensor | None, value_major: bool,
) -> torch.Tensor:  # fmt: skip
    shape = state_shape(count_sequences(cu_seqlens, q), q, v, value_major) if wanted else (0,)
    dtype = torch.float32 if initial is None else initial.dtype
    return torch.empty(shape, dtype=dtype, device=q.device)


@_recurrent_op.register_fake
def _(initial: Any, output_final: bool, q: Any, k: Any, v: Any, g: Any, beta: Any, a_log: Any,
      dt_bias: Any, cu_seqlens: Any, *rest: Any) -> Any:  # fmt: skip
    out = new_like(v)
    return out, _empty_final(initial, output_final, q, v, cu_seqlens, rest[-2])


@_step_op.register_fake
def _(state: Any, slots: Any, q: Any, k: Any, v: Any, *rest: Any) -> Any:
    return new_like(v)
