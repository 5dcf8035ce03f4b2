"""A small K3, three ways that must agree: whole sequences, part by part, token by token.

Also: the gradients of all parameters against plain torch in fp64.
Run: python -m examples.k3
"""

from __future__ import annotations

import copy

import torch

from examples.k3.layers import Config
from examples.k3.model import Stack
from examples.k3.reference import stack_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS = 70  # more than a chunk of KDA and a page of MLA


def relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative root mean square error."""
    return ((out.double() - expected.double()).norm() / expected.double().norm()).item()


def compare_gradients(model: Stack, x: torch.Tensor) -> tuple[float, float]:
    """Errors of the output and of the worst gradient against plain torch in fp64."""
    exact = copy.deepcopy(model).double()
    out, expected = model(x), stack_reference(exact, x.double())
    grad = torch.randn_like(out)
    out.backward(grad)
    expected.backward(grad.double())
    worst = 0.0
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        worst = max(worst, relative(ours.grad, theirs.grad))
    return relative(out, expected), worst


@torch.no_grad()
def compare_decoding(model: Stack, x: torch.Tensor, prefix: int) -> float:
    """Error of prefilling `prefix` tokens and decoding the others, against all at once."""
    whole = model(x)
    caches = model.new_caches(x.shape[0], x.shape[1])
    parts = [model(x[:, :prefix], caches)] if prefix else []
    parts += [model.step(x[:, t : t + 1], caches) for t in range(prefix, x.shape[1])]
    return relative(torch.cat(parts, 1), whole)


def main() -> None:
    torch.manual_seed(0)
    config = Config()
    model = Stack(config).to(DEVICE)
    x = torch.randn(2, TOKENS, config.width, device=DEVICE)
    output, gradient = compare_gradients(model, x)
    print(f"{config.layers} layers on {DEVICE}: output within {output:.1e} of fp64, ", end="")
    print(f"worst of {len(list(model.parameters()))} gradients within {gradient:.1e}")
    for prefix in (0, TOKENS - 4):
        length = prefix + 4
        error = compare_decoding(model, x[:, :length], prefix)
        print(f"{prefix} tokens prefilled and 4 decoded: within {error:.1e} of {length} at once")
        assert error < 1e-4
    assert output < 1e-4 and gradient < 1e-3


if __name__ == "__main__":
    main()
