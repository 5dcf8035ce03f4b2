"""Muon, per head or per matrix: momentum, an orthogonalised step, decoupled weight decay.

    buf <- mu buf + g       N = g + mu buf (Nesterov) or buf
    W <- (1 - lr wd) W - lr scale sqrt(max(r, k)) O(N)

O takes each block [r, k] of N, divides it by its Frobenius norm and iterates
X <- (a + b A + c A A) X with A = X X^T: singular values move into about [0.7, 1.15] and singular
vectors stay. One block per head for Q, K and V projections. Source: Kimi K3 technical report,
section 2.5; constants of Moonlight (arXiv 2502.16982). The iteration runs on Gram matrices, see
`muon_kernels`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from minitriton.kernels import checks
from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.muon_kernels import (
    NORM_EPS,
    Iteration,
    Update,
    momentum_step,
    orthogonalise,
)
from minitriton.kernels.operator import operator
from minitriton.kernels.rows import new_like, rows_of

MOONLIGHT = (3.4445, -4.7750, 2.0315)
PRECISIONS = ("tf32", "tf32x3")
OPTIONS = (
    "heads", "head_dim_first", "weight_decay", "momentum", "nesterov", "steps", "coefficients",
    "scale", "scale_by", "precision",
)  # fmt: skip


def newton_schulz(
    x: torch.Tensor,
    steps: int = 5,
    coefficients: Sequence[float] = MOONLIGHT,
    *,
    precision: str = "tf32",
) -> torch.Tensor:
    """The matrices x with each singular value s moved to p(p(...p(s / |x|))), `steps` times.

    x: [..., rows, columns], fp32, bf16 or fp16, any strides; |x| is the Frobenius norm of each
    matrix plus 1e-7 and p(s) = a s + b s^3 + c s^5 for coefficients (a, b, c). The result is
    contiguous in the shape and dtype of x. Zeros stay zeros. Relative rms error against fp64 before
    the output is rounded: 2e-3 for Gaussian [128, 1024] and wider, 1e-2 for square ones, 2e-2 with
    singular values over three decades (iterating in bf16 gives 1e-2, 2e-2 and 8e-2). precision =
    "tf32x3" is for fp32: 1e-4, with three products for each. No gradient. KernelArgumentError names
    the argument that does not fit.
    """
    checks.float_tensor("x", x)
    if x.dim() < 2:
        raise KernelArgumentError(
            f"argument 'x': shape {tuple(x.shape)}; it must be [..., rows, columns]"
        )
    checks.no_gradient("use .detach()", x=x)
    iteration = _iteration(steps, coefficients, precision)
    return _newton_schulz_op(x, iteration.steps, list(iteration.coefficients), precision)


def muon_step_(
    weight: torch.Tensor,
    grad: torch.Tensor,
    momentum_buffer: torch.Tensor,
    lr: float | torch.Tensor,
    *,
    heads: int = 1,
    head_dim_first: bool = False,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    steps: int = 5,
    coefficients: Sequence[float] = MOONLIGHT,
    scale: float = 0.2,
    scale_by: str = "block",
    precision: str = "tf32",
) -> torch.Tensor:
    """One step of Muon on weight and momentum_buffer, both in place; returns weight.

    weight: [heads * d, columns], or [blocks, rows, columns] with heads = 1, of any strides; grad:
    its shape; momentum_buffer: its shape, contiguous. Each fp32, bf16 or fp16; fp32 inside, and the
    step is orthogonalised in the dtype of momentum_buffer. A head is d neighbouring rows, or, with
    head_dim_first, every heads-th row ([d, heads] order). Views, no copies. lr: a number, or a
    tensor of one float on the device of weight, which a CUDA graph can hold. The step is
    lr * scale * sqrt(max(rows, columns)) with rows and columns of a block, or of the whole weight
    with scale_by = "matrix". precision: as in `newton_schulz`. No gradient. KernelArgumentError
    names the argument that does not fit.
    """
    blocks = _check_step(weight, grad, momentum_buffer, heads, head_dim_first)
    checks.no_gradient("use .detach()", grad=grad, momentum_buffer=momentum_buffer)
    iteration = _iteration(steps, coefficients, precision)
    if scale_by not in ("block", "matrix"):
        raise KernelArgumentError(
            f"argument 'scale_by': {scale_by!r}; it must be 'block' or 'matrix'"
        )
    sides = (blocks if scale_by == "block" else weight).shape[-2:]
    factor = checks.positive("scale", scale) * math.sqrt(max(1, *sides))
    rate, tensor = _check_lr(lr, weight)
    _muon_step_op(
        weight.detach(), grad, momentum_buffer, rate, tensor, heads, head_dim_first,
        checks.fraction("weight_decay", weight_decay), checks.fraction("momentum", momentum),
        nesterov, iteration.steps, list(iteration.coefficients), factor, precision,
    )  # fmt: skip
    return weight


def newton_schulz_reference(
    x: torch.Tensor, steps: int = 5, coefficients: Sequence[float] = MOONLIGHT
) -> torch.Tensor:
    """`newton_schulz` in plain torch, in the dtype of x."""
    a, b, c = coefficients
    wide = x.mT if x.shape[-2] > x.shape[-1] else x
    wide = wide / (torch.linalg.matrix_norm(wide, keepdim=True) + NORM_EPS)
    for _ in range(steps):
        gram = wide @ wide.mT
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide.mT if x.shape[-2] > x.shape[-1] else wide


def muon_step_reference(
    weight: torch.Tensor, grad: torch.Tensor, momentum_buffer: torch.Tensor, lr: float,
    *, heads: int = 1, weight_decay: float = 0.1, momentum: float = 0.95, nesterov: bool = True,
    steps: int = 5, scale: float = 0.2,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(weight, momentum_buffer) after `muon_step_`, in plain torch; heads are neighbouring rows."""
    buffer = momentum * momentum_buffer + grad
    blocks = (grad + momentum * buffer if nesterov else buffer).unflatten(0, (heads, -1))
    factor = scale * math.sqrt(max(blocks.shape[-2:]))
    step = newton_schulz_reference(blocks, steps).reshape(weight.shape)
    return (1 - lr * weight_decay) * weight - lr * factor * step, buffer


class PerHeadMuon(torch.optim.Optimizer):
    """Muon for matrices, each split into the heads of its parameter group.

    params: matrices [heads * d, columns] or stacks [blocks, rows, columns] with heads = 1; give
    embeddings, output heads, norms, vectors and the like to AdamW. lr may be a tensor of one float
    on the parameters' device, to be changed between replays of a CUDA graph. Every option can
    differ per group, foremost heads: `PerHeadMuon([{"params": qkv, "heads": 96}, {"params": o}])`.
    The state, a momentum_buffer in each parameter's dtype, begins with zeros at the first step. The
    options are those of `muon_step_`, and a parameter that does not fit is refused on entry.
    """

    def __init__(
        self, params: Iterable[Any], lr: float | torch.Tensor = 1e-3, *, heads: int = 1,
        head_dim_first: bool = False, weight_decay: float = 0.1, momentum: float = 0.95,
        nesterov: bool = True, steps: int = 5, coefficients: Sequence[float] = MOONLIGHT,
        scale: float = 0.2, scale_by: str = "block", precision: str = "tf32",
    ) -> None:  # fmt: skip
        options = {
            "lr": lr, "heads": heads, "head_dim_first": head_dim_first,
            "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "steps": steps, "coefficients": tuple(coefficients), "scale": scale,
            "scale_by": scale_by, "precision": precision,
        }  # fmt: skip
        super().__init__(params, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; KernelArgumentError for a parameter that does not split into heads."""
        super().add_param_group(param_group)
        group = self.param_groups.pop()
        for weight in group["params"]:
            _check_lr(group["lr"], weight)
            _check_step(weight, weight, weight, group["heads"], group["head_dim_first"])
        self.param_groups.append(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step for every parameter that has a gradient; returns what closure returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            options = {name: group[name] for name in OPTIONS}
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum_buffer"] = torch.zeros(
                        weight.shape, dtype=weight.dtype, device=weight.device
                    )
                muon_step_(weight, weight.grad, state["momentum_buffer"], group["lr"], **options)
        return loss


def _iteration(steps: object, coefficients: Sequence[float], precision: str) -> Iteration:
    numbers = tuple(coefficients) if isinstance(coefficients, Sequence) else ()
    if len(numbers) != 3 or not all(isinstance(n, int | float) for n in numbers):
        raise KernelArgumentError(
            f"argument 'coefficients': must be three numbers, got {coefficients!r}"
        )
    if precision not in PRECISIONS:
        raise KernelArgumentError(
            f"argument 'precision': {precision!r}; it must be one of {PRECISIONS}"
        )
    a, b, c = (float(n) for n in numbers)
    return Iteration(checks.whole("steps", steps, 100), (a, b, c), precision)


def _check_step(
    weight: object, grad: object, buffer: object, heads: int, head_dim_first: bool
) -> torch.Tensor:
    """The blocks of weight, if everything fits."""
    w = checks.float_tensor("weight", weight)
    if w.dim() not in (2, 3):
        raise KernelArgumentError(
            f"argument 'weight': shape {tuple(w.shape)}; it must be [heads * d, columns] or "
            "[blocks, rows, columns]"
        )
    most = max(1, w.shape[0]) if w.dim() == 2 else 1
    if w.shape[0] % checks.whole("heads", heads, most):
        raise KernelArgumentError(
            f"argument 'heads': {heads} does not divide the {w.shape[0]} rows of 'weight'"
        )
    for name, value in (("grad", grad), ("momentum_buffer", buffer)):
        tensor = checks.float_tensor(name, value)
        if tensor.shape != w.shape or tensor.device != w.device:
            raise KernelArgumentError(
                f"argument '{name}': shape {tuple(tensor.shape)} on {tensor.device}; 'weight' "
                f"needs {tuple(w.shape)} on {w.device}"
            )
    if isinstance(buffer, torch.Tensor) and buffer is not w and not buffer.is_contiguous():
        raise KernelArgumentError(
            f"argument 'momentum_buffer': strides {buffer.stride()}; it must be contiguous"
        )
    return _blocks(w, heads, head_dim_first)


def _check_lr(lr: object, weight: torch.Tensor) -> tuple[float, torch.Tensor | None]:
    """(lr, None) of a number, (0, lr) of a tensor on the device."""
    if not isinstance(lr, torch.Tensor):
        return checks.positive("lr", lr) if lr != 0 else 0.0, None
    if lr.numel() != 1 or lr.dtype not in checks.FLOATS or lr.device != weight.device:
        raise KernelArgumentError(
            f"argument 'lr': {lr.dtype} {tuple(lr.shape)} on {lr.device}; it must be a number or "
            f"a tensor of one float on {weight.device}"
        )
    return 0.0, lr


def _blocks(x: torch.Tensor, heads: int, head_dim_first: bool) -> torch.Tensor:
    """x as [blocks, rows, columns], a view."""
    if x.dim() == 3:
        return x
    if head_dim_first:
        return x.unflatten(0, (x.shape[0] // heads, heads)).transpose(0, 1)
    return x.unflatten(0, (heads, x.shape[0] // heads))


def _solve(
    x: torch.Tensor, iteration: Iteration, out: torch.Tensor, update: Update | None = None
) -> None:
    """`orthogonalise` for blocks of any shape."""
    if x.shape[1] > x.shape[2]:
        x, out = x.mT, out.mT
    orthogonalise(x, iteration, out, update)


@operator("newton_schulz")
def _newton_schulz_op(
    x: torch.Tensor, steps: int, coefficients: list[float], precision: str
) -> torch.Tensor:
    out = new_like(x)
    if out.numel() > 0:
        a, b, c = coefficients
        shape = (-1, *x.shape[-2:])
        _solve(x.reshape(shape), Iteration(steps, (a, b, c), precision), out.view(shape))
    return out


@operator("muon_step", mutates_args=("weight", "momentum_buffer"))
def _muon_step_op(
    weight: torch.Tensor, grad: torch.Tensor, momentum_buffer: torch.Tensor, lr: float,
    lr_tensor: torch.Tensor | None, heads: int, head_dim_first: bool, weight_decay: float,
    momentum: float, nesterov: bool, steps: int, coefficients: list[float], factor: float,
    precision: str,
) -> None:  # fmt: skip
    if weight.numel() == 0:
        return
    a, b, c = coefficients
    columns = weight.shape[-1]
    followed = momentum_step(
        rows_of(grad), momentum_buffer.view(-1, columns), momentum, nesterov
    ).view(weight.shape)
    _solve(
        _blocks(followed, heads, head_dim_first), Iteration(steps, (a, b, c), precision),
        _blocks(weight, heads, head_dim_first), Update(lr, lr_tensor, weight_decay, factor),
    )  # fmt: skip


_newton_schulz_op.register_fake(lambda x, steps, coefficients, precision: new_like(x))
_muon_step_op.register_fake(
    lambda weight, grad, momentum_buffer, lr, lr_tensor, heads, head_dim_first, weight_decay,
    momentum, nesterov, steps, coefficients, factor, precision: None
)  # fmt: skip
