"""AdamW over all parameters at once, with gradient clipping, nothing of it on the host.

    g <- g min(1, max_norm / (|g| + 1e-6))                          |g| over all parameters
    p <- p (1 - lr weight_decay),  m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2
    p <- p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

Source: Loshchilov and Hutter, arXiv 1711.05101. Parameters, moments and low-precision copies lie in
flat buffers; 32 gradients at a time go in as a tuple of pointers. The squared norm is summed per
chunk, then over chunks in a fixed order; step count and learning rates are in device memory, so a
CUDA graph captures a step, and equal inputs give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.chunks import CHUNK, Chunks, gradient_chunk


@triton.jit
def _square_kernel(
    grads, partial_ptr, tensor_ptr, first_ptr, size_ptr, chunks, base, present: tl.int64,
    CHUNK: tl.constexpr,
):  # fmt: skip
    chunk = chunks + tl.program_id(0)
    _, _, g, _ = gradient_chunk(grads, present, chunk, tensor_ptr, first_ptr, size_ptr, base, CHUNK)
    tl.store(partial_ptr + chunk, tl.sum(g * g, 0))


@triton.jit
def _prepare_kernel(
    partial_ptr, step_ptr, scalars_ptr, chunks, max_norm, beta1: tl.float64, beta2: tl.float64,
    CLIP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Counts the step; writes clip factor, 1 / (1 - b1^t), 1 / sqrt(1 - b2^t) and the norm."""
    step = tl.load(step_ptr) + 1
    tl.store(step_ptr, step)
    if CLIP:
        total = tl.zeros([BLOCK], tl.float64)
        for first in range(0, chunks, BLOCK):
            at = first + tl.arange(0, BLOCK)
            total += tl.load(partial_ptr + at, mask=at < chunks, other=0.0).to(tl.float64)
        norm = tl.sqrt(tl.sum(total, 0)).to(tl.float32)
        factor = max_norm / (norm + 1e-6)  # NaN stays NaN below
        tl.store(scalars_ptr, tl.where(factor > 1.0, 1.0, factor))
        tl.store(scalars_ptr + 3, norm)
    t = step.to(tl.float64)
    correction1 = 1.0 - tl.exp2(t * tl.log2(beta1))
    correction2 = 1.0 - tl.exp2(t * tl.log2(beta2))
    tl.store(scalars_ptr + 1, (1.0 / correction1).to(tl.float32))
    tl.store(scalars_ptr + 2, (1.0 / tl.sqrt(correction2)).to(tl.float32))


@triton.jit
def _update_kernel(
    grads, data_ptr, mean_ptr, square_ptr, low_ptr, scalars_ptr, lr_ptr, decay_ptr, group_ptr,
    tensor_ptr, first_ptr, size_ptr, chunks, base, present: tl.int64, beta1, beta2, eps,
    CHUNK: tl.constexpr,
):  # fmt: skip
    chunk = chunks + tl.program_id(0)
    tensor, _, g, mask = gradient_chunk(
        grads, present, chunk, tensor_ptr, first_ptr, size_ptr, base, CHUNK
    )
    flat = chunk.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    g *= tl.load(scalars_ptr)
    lr = tl.load(lr_ptr + tl.load(group_ptr + tensor))
    m = tl.load(mean_ptr + flat, mask=mask, other=0.0)
    v = tl.load(square_ptr + flat, mask=mask, other=0.0)
    p = tl.load(data_ptr + flat, mask=mask, other=0.0)
    m += (g - m) * (1 - beta1)
    v = v * beta2 + (1 - beta2) * g * g
    deviation = tl.sqrt_rn(v) * tl.load(scalars_ptr + 2) + eps
    step = lr * tl.load(scalars_ptr + 1) * tl.div_rn(m, deviation)
    p -= step + lr * tl.load(decay_ptr + tensor) * p  # one rounding
    tl.store(mean_ptr + flat, m, mask=mask)
    tl.store(square_ptr + flat, v, mask=mask)
    tl.store(data_ptr + flat, p, mask=mask)
    if low_ptr is not None:
        tl.store(low_ptr + flat, p.to(low_ptr.dtype.element_ty), mask=mask)


class AdamW(torch.optim.Optimizer):
    """AdamW of fp32 parameters in two launches per 32 of them and one more; results of torch's.

    params: parameters or groups of them, which may have their own "lr" and "weight_decay"; all on
    one device. Their data move into one flat buffer (`param.data` become views of it). max_norm:
    clip all gradients together to this L2 norm; `grad_norm` (fp32 scalar on the device) tells what
    it was. low: a dtype (bf16 or fp16) of copies that every step refreshes, see `low_of`.
    Parameters without a gradient are left as they are. `set_lr` writes learning rates to the
    device; inside a CUDA graph capture, `step` leaves them alone. State dicts are those of
    torch.optim.AdamW.

    KernelArgumentError for parameters that are not fp32 or not on one device, for hyper-parameters
    out of range, and for groups added later.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_norm: float | None = None,
        low: torch.dtype | None = None,
    ) -> None:
        _check_options(lr, betas, eps, weight_decay, max_norm)
        self._sealed = False
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._sealed = True
        self.betas, self.eps, self.max_norm = betas, eps, max_norm
        self._chunks = Chunks([p for group in self.param_groups for p in group["params"]])
        self._lay_out(low)
        self.set_lr()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after construction: the flat buffers are laid out once."""
        if self._sealed:
            raise KernelArgumentError("argument 'param_group': give all groups to the constructor")
        super().add_param_group(param_group)

    def _lay_out(self, low: torch.dtype | None) -> None:
        """Flat buffers, and what the kernels know of each parameter."""
        self._data, self._mean, self._square = (self._chunks.new() for _ in range(3))
        self._low = None if low is None else self._chunks.new(low)
        device = self._data.device
        groups = [g for g, group in enumerate(self.param_groups) for _ in group["params"]]
        decays = [
            float(group["weight_decay"]) for group in self.param_groups for _ in group["params"]
        ]
        self._group = torch.tensor(groups, dtype=torch.int32, device=device)
        self._decay = torch.tensor(decays, dtype=torch.float32, device=device)
        self._partial = torch.zeros(self._chunks.count, dtype=torch.float32, device=device)
        self._scalars = torch.ones(4, dtype=torch.float32, device=device)
        self._step = torch.zeros(1, dtype=torch.float32, device=device)
        self._lr = torch.zeros(len(self.param_groups), dtype=torch.float32, device=device)
        self._given_lr: list[float] = []
        for i, p in enumerate(self._chunks.params):
            view = self._chunks.view(self._data, i)
            view.copy_(p.data)
            p.data = view
            if self._low is not None:
                self._chunks.view(self._low, i).copy_(p.data)
        self._expose_state()

    def _expose_state(self) -> None:
        for i, p in enumerate(self._chunks.params):
            self.state[p] = {
                "step": self._step[0],
                "exp_avg": self._chunks.view(self._mean, i),
                "exp_avg_sq": self._chunks.view(self._square, i),
            }

    def low_of(self, param: torch.Tensor) -> torch.Tensor:
        """The low-precision copy of a parameter: one tensor for ever, refreshed by every step."""
        if self._low is None:
            raise KernelArgumentError("argument 'low': no copies; construct AdamW(..., low=dtype)")
        return self._chunks.view(
            self._low, next(i for i, p in enumerate(self._chunks.params) if p is param)
        )

    def refresh_low(self) -> None:
        """Makes the copies again, after parameters were written by hand or loaded."""
        if self._low is not None:
            self._low.copy_(self._data)

    @property
    def grad_norm(self) -> torch.Tensor:
        """L2 norm of all gradients of the last step before clipping; meaningful with max_norm."""
        return self._scalars[3]

    def set_lr(self, lr: float | None = None) -> None:
        """Learning rate of all groups, or, without an argument, what the groups hold now."""
        for group in self.param_groups:
            group["lr"] = group["lr"] if lr is None else lr
        wanted = [float(group["lr"]) for group in self.param_groups]
        if wanted != self._given_lr:
            self._lr.copy_(torch.tensor(wanted, dtype=torch.float32))
            self._given_lr = wanted

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step from the gradients in `param.grad`; returns the closure's value."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not (self._data.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.set_lr()
        launches = self._chunks.launches(self._mean)
        tables = self._chunks.tables
        if self.max_norm is not None:
            for grads, base, present, chunks, count in launches:
                _square_kernel[(count,)](
                    grads, self._partial, *tables, chunks, base, present, CHUNK=CHUNK
                )  # fmt: skip
        _prepare_kernel[(1,)](
            self._partial, self._step, self._scalars, self._partial.numel(), self.max_norm or 0.0,
            *self.betas, CLIP=self.max_norm is not None, BLOCK=1024,
        )  # fmt: skip
        for grads, base, present, chunks, count in launches:
            _update_kernel[(count,)](
                grads, self._data, self._mean, self._square, self._low, self._scalars, self._lr,
                self._decay, self._group, *tables, chunks, base, present, *self.betas, self.eps,
                CHUNK=CHUNK,
            )  # fmt: skip
        return loss

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.AdamW's: a step count of its own for every parameter."""
        state_dict: dict[str, Any] = super().state_dict()
        states = state_dict["state"]
        state_dict["state"] = {i: {**s, "step": s["step"].clone()} for i, s in states.items()}
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state dict of this class or of torch.optim.AdamW with the same parameters."""
        super().load_state_dict(state_dict)
        loaded = [self.state.get(p, {}) for p in self._chunks.params]
        for i, state in enumerate(loaded):
            for name, flat in (("exp_avg", self._mean), ("exp_avg_sq", self._square)):
                view = self._chunks.view(flat, i)
                view.copy_(state[name]) if name in state else view.zero_()
        steps = {float(state["step"]) for state in loaded if "step" in state}
        if len(steps) > 1:
            raise KernelArgumentError(
                f"argument 'state_dict': parameters at different steps: {sorted(steps)}"
            )
        self._step.fill_(steps.pop() if steps else 0.0)
        self._expose_state()
        self._given_lr = []
        self.set_lr()


def _check_options(
    lr: float, betas: tuple[float, float], eps: float, decay: float, max_norm: float | None
) -> None:
    checks = (
        ("lr", lr, lr >= 0, "must not be negative"),
        ("betas", betas, all(0 < b < 1 for b in betas), "must lie between 0 and 1"),
        ("eps", eps, eps >= 0, "must not be negative"),
        ("weight_decay", decay, decay >= 0, "must not be negative"),
        ("max_norm", max_norm, max_norm is None or max_norm > 0, "must be positive or None"),
    )
    for name, value, fits, rule in checks:
        if not fits:
            raise KernelArgumentError(f"argument '{name}': {rule}, got {value!r}")
