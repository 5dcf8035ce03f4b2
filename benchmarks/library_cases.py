"""What `library_speed.py` times: contenders, bytes and operations of each case."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from minitriton import kernels

BF16 = torch.bfloat16


@dataclass
class Case:
    """One row of the table."""

    title: str
    calls: dict[str, Callable]  # contender -> call; "minitriton" is ours
    bytes: float  # that must move
    flop: float = 0.0  # that must be done by tensor cores
    error: Callable | None = None  # relative rms error of a call's result
    bound: float = 8e-3
    rounds: int = 1000


def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    return ((out.double() - expected.double()).norm() / expected.double().norm()).item()


def pair(
    title: str, functions: dict[str, Callable], leaves: list[torch.Tensor], grad: torch.Tensor,
    moved: tuple[float, float], flop: tuple[float, float] = (0.0, 0.0),
    expected: Callable | None = None,
) -> Iterator[Case]:  # fmt: skip
    """The forward case of functions of `leaves`, and the backward case through autograd."""
    error = None
    if expected is not None:
        wanted = expected()
        error = lambda out: relative(out[: len(wanted)], wanted)  # noqa: E731
    with torch.no_grad():
        calls = {n: (lambda f=f: f(*leaves)) for n, f in functions.items()}
        yield Case(f"{title} forward", calls, moved[0], flop[0], error)
    leaves = [x.detach().requires_grad_() for x in leaves]
    backward, graphs = {}, {}
    for name, function in functions.items():

        def call(name: str = name, function: Callable = function) -> object:
            if name not in graphs:
                graphs[name] = function(*leaves)
            return torch.autograd.grad(graphs[name], leaves, grad, retain_graph=True)

        backward[name] = call
    yield Case(f"{title} backward", backward, moved[1], flop[1])


def situ() -> Iterator[Case]:
    for rows, columns in ((131072, 3072), (8192, 6144), (8192, 33792)):
        both = random(rows, 2 * columns)
        gate, up = both.chunk(2, dim=-1)
        functions = {
            "minitriton": kernels.situ_glu, "torch": kernels.situ_glu_reference,
            "torch.compile": torch.compile(kernels.situ_glu_reference, dynamic=False),
        }  # fmt: skip
        n = rows * columns
        yield from pair(
            f"SiTU-GLU {rows}x{columns}", functions, [gate, up], random(rows, columns),
            (6 * n, 10 * n),
            expected=lambda g=gate[:512], u=up[:512]: kernels.situ_glu_reference(
                g.double(), u.double()
            ),
        )  # fmt: skip


FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {"situ": situ}
