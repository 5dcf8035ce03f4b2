"""Kimi Delta Attention (KDA), chunked: the training and prefill form, forward and backward.

    S_t = (I - beta_t k_t k_t^T) diag(exp g_t) S_{t-1} + beta_t k_t v_t^T      S in R^{K x V}
    o_t = scale S_t^T q_t

Source: Kimi K3 technical report, equations 1 to 6; Kimi Linear (arXiv 2510.26692), equations 6 to
9 for chunks. The forward pass (kda_forward.py) is one launch or two over all chunks at once and one
over the chunks of a sequence in order. Only the inputs are saved: the backward pass
(kda_backward.py) runs the former again, which costs less than 256 bytes per token and head.
"""

from __future__ import annotations

from typing import Any

import torch

from minitriton.kernels import checks
from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.kda_backward import backward
from minitriton.kernels.kda_chunks import chunks_of
from minitriton.kernels.kda_forward import Options, Results, prepare, scan
from minitriton.kernels.operator import operator
from minitriton.kernels.packing import count_sequences
from minitriton.kernels.rows import dense, new_like

WIDEST = 128  # channels of a head
GATES = {None: 0, "sigmoid": 1, "softplus": 2}


def chunk_kda(
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
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(o, state after the last token or None); differentiable in every float tensor.

    q, k: [B, T, H, K], v: [B, T, H, V], K and V from 1 to 128, all fp32, bf16 or fp16; views whose
    last stride is 1 are read in place. o: [B, T, H, V], contiguous, in their dtype. scale: K^-0.5
    by default. qk_l2norm: q and k are divided by sqrt(sum of squares + 1e-6) first.

    g: [B, T, H, K] fp32, bf16 or fp16, by `gate`:
    - None: the logarithm (natural) of the decay itself, <= 0;
    - "sigmoid": gate_floor * sigmoid(exp(A_log) * (g + dt_bias)), Kimi K3's gate, gate_floor < 0;
    - "softplus": -exp(A_log) * softplus(g + dt_bias), Kimi Linear's.
    A_log: [H] fp32, needed with a gate; dt_bias: [H, K] fp32 or None for zeros. Decays may be as
    strong as they like; the sigmoid gate with gate_floor >= -5 is the fastest form.
    beta: [B, T, H], in (0, 1), or its logits with beta_sigmoid.

    initial_state: fp32 [N, H, K, V] ("kv") or [N, H, V, K] ("vk", `state_layout`), zeros if None;
    the state returned is laid out alike. N is B, or with cu_seqlens their number less one.
    cu_seqlens: int32 or int64 [N + 1], the bounds of sequences packed in one row (B = 1), empty
    ones allowed. On the CPU it costs no synchronisation; on a GPU it is read back on each call,
    which a CUDA graph does not allow.
    KernelArgumentError names the argument that does not fit.
    """
    check_tensors(q, k, v, g, beta)
    options = Options(
        q.shape[3] ** -0.5 if scale is None else checks.positive("scale", scale),
        check_gate(gate, A_log, dt_bias, gate_floor, q),
        float(gate_floor),
        bool(qk_l2norm),
        bool(beta_sigmoid),
        _check_state(initial_state, state_layout, count_sequences(cu_seqlens, q), q, v),
    )
    a_log, bias = (A_log, dt_bias) if options.gate else (None, None)
    o, final = _kda_op(q, k, v, g, beta, a_log, bias, initial_state, cu_seqlens, *options)
    return o, final if output_final_state else None


def chunk_kda_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, *,
    scale: float | None = None, gate: str | None = None, A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None, gate_floor: float = -5.0, qk_l2norm: bool = False,
    beta_sigmoid: bool = False, initial_state: torch.Tensor | None = None,
    output_final_state: bool = False, state_layout: str = "kv",
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """`chunk_kda` in plain torch, token by token, in the dtype of its arguments."""
    if gate is not None:
        assert A_log is not None
        z, sharpness = g if dt_bias is None else g + dt_bias, A_log.exp()[:, None]
        if gate == "sigmoid":
            g = gate_floor * torch.sigmoid(sharpness * z)
        else:
            g = -sharpness * torch.nn.functional.softplus(z)
    if qk_l2norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * (q.shape[3] ** -0.5 if scale is None else scale)
    alpha, beta = g.exp(), torch.sigmoid(beta) if beta_sigmoid else beta
    lengths = [q.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
    count = q.shape[0] if cu_seqlens is None else len(lengths)
    state = q.new_zeros(count, *q.shape[2:], v.shape[3])
    if initial_state is not None:
        state = initial_state.mT if state_layout == "vk" else initial_state
    out, final, token = [], [], 0
    for i, length in enumerate(lengths):
        s = state if cu_seqlens is None else state[i : i + 1]
        for t in range(token, token + length):
            s = s * alpha[:, t, :, :, None]
            error = v[:, t] - torch.einsum("bhkv,bhk->bhv", s, k[:, t])
            s = s + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * error)
            out.append(torch.einsum("bhkv,bhk->bhv", s, q[:, t]))
        final.append(s)
        token += length
    o = torch.stack(out, 1) if out else torch.zeros_like(v)
    if not output_final_state:
        return o, None
    last = torch.cat(final) if final else state
    return o, last.mT.contiguous() if state_layout == "vk" else last


def _fail(name: str, problem: str) -> KernelArgumentError:
    return KernelArgumentError(f"argument '{name}': {problem}")


def _shaped(
    name: str, value: object, shape: tuple[int, ...], why: str, like: torch.Tensor
) -> torch.Tensor:
    """`value` if it is a float tensor of the shape on the device of q."""
    tensor = checks.float_tensor(name, value)
    if tuple(tensor.shape) != shape:
        raise _fail(name, f"shape {tuple(tensor.shape)}; it must be {shape}, {why}")
    if tensor.device != like.device:
        raise _fail(name, f"device {tensor.device} differs from that of 'q', {like.device}")
    return tensor


def check_tensors(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> None:
    if checks.float_tensor("q", q).dim() != 4 or not 0 < q.shape[3] <= WIDEST:
        raise _fail("q", f"shape {tuple(q.shape)}; it must be [B, T, H, K] with 1 <= K <= {WIDEST}")
    checks.like("k", k, "q", q)
    rows = tuple(q.shape[:3])
    if (
        checks.float_tensor("v", v).dim() != 4
        or tuple(v.shape[:3]) != rows
        or not 0 < v.shape[3] <= WIDEST
    ):
        raise _fail(
            "v",
            f"shape {tuple(v.shape)}; it must be [{rows[0]}, {rows[1]}, {rows[2]}, V] with "
            f"1 <= V <= {WIDEST}",
        )
    if v.dtype != q.dtype or v.device != q.device:
        raise _fail("v", f"{v.dtype} on {v.device}; 'q' needs {q.dtype} on {q.device}")
    _shaped("g", g, tuple(q.shape), "that of 'q'", q)
    _shaped("beta", beta, rows, "[B, T, H] of 'q'", q)


def check_gate(
    gate: str | None, a_log: object, dt_bias: object, floor: float, q: torch.Tensor
) -> int:
    """The number of the gate."""
    if gate not in GATES:
        raise _fail("gate", f"must be None, 'sigmoid' or 'softplus', got {gate!r}")
    if not isinstance(floor, int | float) or not -float("inf") < floor < 0:
        raise _fail("gate_floor", f"must be a negative number, got {floor!r}")
    if gate is None:
        for name, value in (("A_log", a_log), ("dt_bias", dt_bias)):
            if value is not None:
                raise _fail(name, "without a gate there is no use for it; give gate='sigmoid'")
        return 0
    for name, value, shape in (("A_log", a_log, q.shape[2:3]), ("dt_bias", dt_bias, q.shape[2:])):
        if value is None and name == "dt_bias":
            continue
        tensor = _shaped(name, value, tuple(shape), "[H] or [H, K] of 'q'", q)
        if tensor.dtype != torch.float32:
            raise _fail(name, f"dtype {tensor.dtype}; it must be torch.float32")
    return GATES[gate]


def _check_state(
    initial: object, layout: str, count: int, q: torch.Tensor, v: torch.Tensor
) -> bool:
    """Whether states are [N, H, V, K]."""
    if layout not in ("kv", "vk"):
        raise _fail("state_layout", f"must be 'kv' or 'vk', got {layout!r}")
    if initial is not None:
        shape = state_shape(count, q, v, layout == "vk")
        why = f"[N, H, {'V, K' if layout == 'vk' else 'K, V'}] with N the number of sequences"
        tensor = _shaped("initial_state", initial, shape, why, q)
        if tensor.dtype != torch.float32:
            raise _fail("initial_state", f"dtype {tensor.dtype}; it must be torch.float32")
    return layout == "vk"


def state_shape(
    count: int, q: torch.Tensor, v: torch.Tensor, value_major: bool
) -> tuple[int, int, int, int]:
    keys, values = q.shape[3], v.shape[3]
    return (count, q.shape[2], *((values, keys) if value_major else (keys, values)))


def _empty_outputs(
    q: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None, value_major: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    count = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = state_shape(count, q, v, value_major)
    out = new_like(v)
    return out, torch.empty(shape, dtype=torch.float32, device=v.device)


@operator("chunk_kda")
def _kda_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    a_log: torch.Tensor | None, dt_bias: torch.Tensor | None, initial: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None, scale: float, gate: int, floor: float, qk_l2norm: bool,
    beta_sigmoid: bool, value_major: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    chunks = chunks_of(q.shape[0], q.shape[1], cu_seqlens, q.device)
    options = Options(scale, gate, floor, qk_l2norm, beta_sigmoid, value_major)
    q, k, v, g = (dense(x) for x in (q, k, v, g))
    out, final = _empty_outputs(q, v, cu_seqlens, value_major)
    a_log, dt_bias, initial = (
        None if x is None else x.contiguous() for x in (a_log, dt_bias, initial)
    )
    operands = prepare(q, k, g, beta, a_log, dt_bias, options, chunks)
    scan(operands, v, initial, options, chunks, Results(out, final, None, None))
    return out, final


@operator("chunk_kda_backward")
def _kda_backward_op(
    grad: torch.Tensor | None, final_grad: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor,
    v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, a_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None, initial: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
    scale: float, gate: int, floor: float, qk_l2norm: bool, beta_sigmoid: bool, value_major: bool,
) -> list[torch.Tensor]:  # fmt: skip
    """Gradients of q, k, v, g, beta, a_log, dt_bias, initial, shaped alike; empty if absent.

    kda_backward.backward(grad, final_grad, q, k, v, g, beta, a_log, dt_bias, initial, options,
    chunks) gives them as a list. What it gets has contiguous rows; final_grad and initial are
    contiguous or None. It calls kda_forward.prepare and kda_forward.scan to have operands, states
    and values again.
    """
    chunks = chunks_of(q.shape[0], q.shape[1], cu_seqlens, q.device)
    options = Options(scale, gate, floor, qk_l2norm, beta_sigmoid, value_major)
    q, k, v, g = (dense(x) for x in (q, k, v, g))
    grad = torch.zeros_like(v) if grad is None else dense(grad)
    final_grad, a_log, dt_bias, initial = (
        None if x is None else x.contiguous() for x in (final_grad, a_log, dt_bias, initial)
    )
    return backward(
        grad, final_grad, q, k, v, g, beta, a_log, dt_bias, initial, options, chunks
    )  # fmt: skip


@_kda_op.register_fake
def _(q: Any, k: Any, v: Any, g: Any, beta: Any, a_log: Any, dt_bias: Any, initial: Any,
      cu_seqlens: Any, scale: float, gate: int, floor: float, qk_l2norm: bool, beta_sigmoid: bool,
      value_major: bool) -> Any:  # fmt: skip
    return _empty_outputs(q, v, cu_seqlens, value_major)


@_kda_backward_op.register_fake
def _(grad: Any, final_grad: Any, *inputs: Any) -> Any:
    shaped = inputs[0]
    return [shaped.new_empty(0) if x is None else new_like(x) for x in inputs[:8]]


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:9])
    ctx.options = inputs[9:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Any, final_grad: Any) -> Any:
    inputs = ctx.saved_tensors
    gradients = _kda_backward_op(grad, final_grad, *inputs, *ctx.options)
    kept = (None if x is None else y for x, y in zip(inputs[:8], gradients, strict=True))
    return *kept, None, *(None for _ in ctx.options)


_kda_op.register_autograd(_differentiate, setup_context=_save)
